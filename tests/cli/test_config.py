"""Settings: what beats what, where each value came from, and what is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from waste.cli.config import ISAS, POLICIES, SETTINGS, Config, lookahead_experts
from waste.errors import ExitCode, UsageError
from waste.kernels import isa


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "home/.config/waste").mkdir(parents=True)
    return tmp_path / "home"


def load(home: Path, **variables: str) -> Config:
    project = home.parent / "project"
    project.mkdir(exist_ok=True)
    return Config.load({"HOME": str(home), **variables}, project)


def write_user(home: Path, text: str) -> None:
    (home / ".config/waste/config.toml").write_text(text)


def write_project(home: Path, text: str) -> None:
    (home.parent / "project").mkdir(exist_ok=True)
    (home.parent / "project/waste.toml").write_text(text)


def test_each_source_beats_the_next_one(home: Path) -> None:
    def origin(config: Config) -> str:
        return config.values["threads"].origin

    assert (load(home).get("threads"), origin(load(home))) == (None, "default")
    write_user(home, "threads = 1")
    assert (load(home).get("threads"), origin(load(home))) == (1, str(home / ".config/waste/config.toml"))
    write_project(home, "threads = 2")
    assert (load(home).get("threads"), origin(load(home))) == (2, "waste.toml")
    config = load(home, WASTE_THREADS="3")
    assert (config.get("threads"), origin(config)) == (3, "WASTE_THREADS")
    assert config.get("threads", 4) == 4


def test_a_flag_of_zero_is_a_flag(home: Path) -> None:
    assert load(home, WASTE_TEMP="0.5").get("temp", 0.0) == 0.0
    assert load(home, WASTE_MAX_TOKENS="9").get("max_tokens", 0) == 0


def test_values_are_parsed_wherever_they_come_from(home: Path) -> None:
    write_project(home, 'ram = "2GiB"\ntemp = 1\nbackend = "reference"\ndebug = true\n')
    config = load(home, WASTE_TOP_P="0.5")
    assert [config.get(key) for key in ("ram", "temp", "backend", "debug", "top_p")] == [
        2 << 30,
        1,
        "reference",
        True,
        0.5,
    ]
    assert config.parse("ram", "1GiB") == 1 << 30
    assert config.parse("ram", None) == 2 << 30


def test_xdg_directories_are_used_when_absolute(home: Path) -> None:
    elsewhere = home.parent / "elsewhere"
    (elsewhere / "waste").mkdir(parents=True)
    (elsewhere / "waste/config.toml").write_text("threads = 5")
    assert load(home, XDG_CONFIG_HOME=str(elsewhere)).get("threads") == 5
    assert load(home, XDG_CONFIG_HOME="elsewhere").get("threads") is None
    assert load(home, XDG_CACHE_HOME="/c").cache_dir == Path("/c/waste")
    assert load(home).cache_dir == home / ".cache/waste"


def test_an_empty_variable_is_no_variable(home: Path) -> None:
    assert load(home, WASTE_RAM="", WASTE_DEBUG="").get("ram") is None


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WASTE_RAM": "lots"}, "WASTE_RAM"),
        ({"WASTE_RAM": "0"}, "WASTE_RAM"),
        ({"WASTE_THREADS": "0"}, "WASTE_THREADS"),
        ({"WASTE_THREADS": "two"}, "WASTE_THREADS"),
        ({"WASTE_CTX": "1.5"}, "WASTE_CTX"),
        ({"WASTE_TEMP": "warm"}, "WASTE_TEMP"),
        ({"WASTE_BACKEND": "tpu"}, "WASTE_BACKEND"),
        ({"WASTE_DEBUG": "maybe"}, "WASTE_DEBUG"),
        ({"WASTE_ISA": "sse9"}, "WASTE_ISA"),
        ({"WASTE_EXPERTS": " "}, "WASTE_EXPERTS"),
        ({"WASTE_EXPERTS": "wt5"}, "WASTE_EXPERTS is 'wt5': .*'wt5'"),
        ({"WASTE_TRUNK": "q6,kda=q5"}, "WASTE_TRUNK is 'q6,kda=q5': .*'q5'"),
        ({"WASTE_TRUNK": "q6,moe=q8"}, "WASTE_TRUNK is 'q6,moe=q8': 'moe=q8'"),
        ({"WASTE_TRUNK": "kda=q8,kda=q6"}, "WASTE_TRUNK .*kda comes twice"),
        ({"WASTE_TRUNK": "table=wt4"}, "WASTE_TRUNK .*table"),
        ({"WASTE_VRAM": "-1"}, "WASTE_VRAM"),
        ({"WASTE_SIZE": "0"}, "WASTE_SIZE"),
        ({"WASTE_POLICY": "fifo"}, "WASTE_POLICY is 'fifo', expected one of adaptive, lru, lfu"),
        ({"WASTE_LOOKAHEAD": "0"}, "WASTE_LOOKAHEAD is '0', expected auto, off, or a whole number of 1 or more"),
        ({"WASTE_LOOKAHEAD": "on"}, "WASTE_LOOKAHEAD"),
        ({"WASTE_LEARN": "some"}, "WASTE_LEARN"),
        ({"WASTE_MLOCK": "2"}, "WASTE_MLOCK"),
        ({"WASTE_EXPERTS_DIR": "/a::/b"}, "WASTE_EXPERTS_DIR is ''"),
        ({"WASTE_EXPERTS_DIR": "/a\0"}, "WASTE_EXPERTS_DIR"),
        ({"WASTE_THREDS": "2"}, "WASTE_THREDS"),
        ({"WASTE_threads": "2"}, "WASTE_threads"),
    ],
    ids=str,
)
def test_a_variable_that_makes_no_sense_is_named(home: Path, variables: dict[str, str], named: str) -> None:
    with pytest.raises(UsageError, match=named) as caught:
        load(home, **variables)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_typo_is_told_what_was_meant(home: Path) -> None:
    with pytest.raises(UsageError) as caught:
        load(home, WASTE_THREDS="2")
    assert "WASTE_THREADS" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("thread = 2", "'thread' in 'waste.toml'"),
        ("threads = -1", "'threads' in 'waste.toml'"),
        ("threads = [1]", "'threads' in 'waste.toml'"),
        ("threads = 2.5", "'threads' in 'waste.toml'"),
        ("threads = true", "'threads' in 'waste.toml'"),
        ("[run]\nthreads = 1", "'run' in 'waste.toml'"),
        ('ram = "x"', "'ram' in 'waste.toml'"),
        ('experts = "wt5"', "'experts' in 'waste.toml'"),
        ('trunk = "q6;kda=q8"', "'trunk' in 'waste.toml'"),
        ("experts_dir = 1e3", "'experts_dir' in 'waste.toml' is 1000.0, expected an array of texts"),
        ('experts_dir = ["a", 1]', "'experts_dir' in 'waste.toml' is ['a', 1], expected an array of texts"),
        ('experts_dir = ["a", ""]', "'experts_dir' in 'waste.toml'"),
        ('experts_dir = {a = "b"}', "'experts_dir' in 'waste.toml'"),
        ("lookahead = -1", "'lookahead' in 'waste.toml'"),
        ('policy = ["lru"]', "'policy' in 'waste.toml' is a list, expected one value"),
        ("threads =", "'waste.toml' is not TOML"),
        ("threads = 1\nthreads = 2", "'waste.toml' is not TOML"),
    ],
)
def test_a_file_that_makes_no_sense_is_named_with_its_key(home: Path, text: str, named: str) -> None:
    write_project(home, text)
    with pytest.raises(UsageError) as caught:
        load(home)
    assert named in caught.value.message


def test_a_file_that_is_no_text_or_no_file_is_named(home: Path) -> None:
    (home.parent / "project").mkdir()
    (home.parent / "project/waste.toml").write_bytes(b"threads = 1 # \xff")
    with pytest.raises(UsageError, match=r"'waste.toml' is not UTF-8 at byte 14"):
        load(home)
    (home.parent / "project/waste.toml").unlink()
    (home.parent / "project/waste.toml").mkdir()
    with pytest.raises(UsageError, match=r"cannot read 'waste.toml'"):
        load(home)


def test_every_setting_has_a_default_that_is_valid() -> None:
    for setting in SETTINGS:
        if setting.many:
            assert setting.default == ()
        elif setting.default is not None:
            assert setting.read(str(setting.default), setting.key) == setting.default


def test_directories_are_several(home: Path) -> None:
    """An array in a file, where a colon is a character like any other; parts of a text in a variable; one an option."""
    assert load(home).get("experts_dir") == ()
    write_project(home, 'experts_dir = ["/a:b", "c d"]')
    assert load(home).get("experts_dir") == ("/a:b", "c d")
    write_project(home, 'experts_dir = "/a:b"')
    assert load(home).get("experts_dir") == ("/a", "b")
    write_project(home, "experts_dir = []")
    assert load(home).get("experts_dir") == ()
    config = load(home, WASTE_EXPERTS_DIR="/x:/y")
    assert config.parse("experts_dir", None) == config.parse("experts_dir", []) == ("/x", "/y")
    assert config.parse("experts_dir", ["/z:1", "w"]) == ("/z:1", "w")
    with pytest.raises(UsageError, match="--experts-dir is ''"):
        config.parse("experts_dir", ["/z", ""])


def test_lookahead_is_a_word_or_a_number(home: Path) -> None:
    write_project(home, "lookahead = 4")
    config = load(home)
    assert config.get("lookahead") == "4"
    assert [lookahead_experts(config.parse("lookahead", flag)) for flag in (None, "auto", "off", "12")] == [
        4,
        None,
        0,
        12,
    ]
    assert lookahead_experts(load(home, WASTE_LOOKAHEAD="off").get("lookahead")) == 0


def test_a_flag_that_is_off_is_a_flag(home: Path) -> None:
    write_project(home, "learn = true\nmlock = true\n")
    config = load(home)
    assert [config.get(key, flag) for key in ("learn", "mlock") for flag in (None, False, True)] == [
        True,
        False,
        True,
    ] * 2
    assert load(home, WASTE_LEARN="0").get("learn") is False


def test_policies_are_those_of_the_cache() -> None:
    policy = pytest.importorskip("waste.tiers.policy")
    if not hasattr(policy, "POLICIES"):
        pytest.skip("the cache has one policy, and no names for it")
    assert set(POLICIES) == set(policy.POLICIES)


def test_instruction_sets_are_those_of_native_code() -> None:
    assert ISAS == isa.ISAS
