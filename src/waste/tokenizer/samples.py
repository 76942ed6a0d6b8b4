"""Deterministic texts that tell tokenizers apart: scripts, spaces, digits, look-alikes, mixes of vocabulary."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence

from waste.tokenizer.bpe import Tokenizer

# First and last code point of blocks; assigned letters, marks and digits are drawn from them.
_BLOCKS = {
    "latin": (0x41, 0x24F),
    "greek": (0x370, 0x3FF),
    "cyrillic": (0x400, 0x52F),
    "armenian": (0x531, 0x587),
    "hebrew": (0x591, 0x5F4),
    "arabic": (0x600, 0x6FF),
    "syriac": (0x700, 0x74F),
    "devanagari": (0x900, 0x97F),
    "bengali": (0x980, 0x9FE),
    "gurmukhi": (0xA01, 0xA76),
    "gujarati": (0xA81, 0xAFF),
    "tamil": (0xB82, 0xBFA),
    "telugu": (0xC00, 0xC7F),
    "kannada": (0xC80, 0xCF2),
    "malayalam": (0xD00, 0xD7F),
    "sinhala": (0xD81, 0xDF4),
    "thai": (0xE01, 0xE5B),
    "lao": (0xE81, 0xEDF),
    "tibetan": (0xF00, 0xFDA),
    "myanmar": (0x1000, 0x109F),
    "georgian": (0x10A0, 0x10FF),
    "ethiopic": (0x1200, 0x137C),
    "cherokee": (0x13A0, 0x13FD),
    "canadian": (0x1400, 0x167F),
    "khmer": (0x1780, 0x17F9),
    "mongolian": (0x1800, 0x18AA),
    "kana": (0x3041, 0x30FF),
    "bopomofo": (0x3105, 0x312F),
    "jamo": (0x1100, 0x11FF),
    "hangul": (0xAC00, 0xD7A3),
    "han": (0x4E00, 0x9FFF),
    "han_a": (0x3400, 0x4DBF),
    "han_b": (0x20000, 0x2A6D6),
    "fullwidth": (0xFF01, 0xFFEE),
    "letterlike": (0x2100, 0x218B),
    "mathematical": (0x1D400, 0x1D7FF),
    "gothic": (0x10330, 0x1034A),
}
_SPACES = [
    "",
    " ",
    " ",
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u2003 ",
    " \t\n\n  ",
]
_PUNCTUATION = [*".,;:!?-–—…'\"“”‘’()[]{}<>|/\\@#$%^&*_+=~`¿¡·。，、！？「」《》", "...", "?!", "}\n///", "//", "->"]
_EMOJI = ["😀", "👩‍👩‍👧", "🇩🇪", "👍🏽", "❤️", "1️⃣", "🏴‍☠️", "🚀🚀"]
_ODD = [
    "\x00",
    "\x01",
    "\x1b[0m",
    "\x7f",
    "\x85",
    "\u200b",
    "\u200d",
    "\ufeff",
    "\ufffd",
    "\u2028",
    "\U0001f9ff",
    "\ue000",
]
_MARKS = ["e\u0301", "é", "a\u0308\u0323", "\u0301x", "ก้", "नि", "ا\u064f", "ﬁ", "ſ", "'ſ", "İ", "ß", "Ⅳ", "½", "٣٤٥٦"]
_CODE = [
    "def f(x):\n    return x  # ok\n",
    "for (int i=0;i<10;++i){a[i]=i*i;}",
    "SELECT * FROM t WHERE a>=1.5e-3;",
    '<div class="x">&nbsp;</div>',
    "https://example.org/a_b?c=d%20e#f",
    "camelCaseHTTPServer snake_case_1",
    "\t\tif not ok:\r\n\t\t\traise\r\n",
]
_FIXED = [
    "",
    " ",
    "  ",
    "\n",
    "a",
    " a",
    "a ",
    "the quick brown fox",
    "I'M can't 'Tis WE'LL they'd I'VE CAN'Tell we'Sing they'Ready I'LLama 'Verily",
    "1234567 12 3 0.5",
    "A股 维生素C 你好世界 QQ音乐 C罗 世界world世界 〇三々カタカナ世界",
    "ＡＢＣ　全角",
    "x" * 300,
    " " * 300 + "x",
    "\n" * 40,
    "ab" * 200,
    "汉" * 100,
    "." * 100,
    "12" * 100,
    "word " * 50,
    "\r\n" * 20,
    " \n" * 20,
    "é" * 50,
]


def sample_texts(tokenizer: Tokenizer, minimum: int, markers: Sequence[str] = ()) -> list[str]:
    """At least `minimum` texts, the same for the same arguments.

    Some contain added tokens and parts of them: the tokenizer's own and `markers`.
    """
    rng = random.Random(1911)
    scripts = [_letters(first, last) for first, last in _BLOCKS.values()]
    pieces = _vocabulary(tokenizer, rng)
    added = list(dict.fromkeys([*(token.content for token in tokenizer.spec.added), *markers]))
    added = added if len(added) <= 100 else [*added[:50], *added[-50:]]
    numbers = ["7", "42", "123", "1234", "31415926535", "1,000.50", "0x1F"]

    texts = [*_FIXED, *_EMOJI, *_ODD, *_MARKS, *_CODE]
    for content in added:
        texts += [
            content,
            content[:-1],
            content[1:],
            f"x{content}y",
            f" {content} ",
            f"\n{content}{content}.",
            f"<{content}>",
        ]
    for letters in scripts:
        texts += ["".join(rng.choices(letters, k=9)), " ".join("".join(rng.choices(letters, k=4)) for _ in range(4))]
    # A rule of a pattern shows only where a piece of the vocabulary would reach over the cut it makes.
    for piece in pieces[:300]:
        texts += [f"n'{piece}", f"N'{piece.swapcase()}", f"{rng.choice('.-_1 A汉é')}{piece}"]
    sources = [_PUNCTUATION, _EMOJI, _ODD, _MARKS, _CODE, numbers, _SPACES]
    if added:
        sources.append([*added, *(content[:-1] for content in added)])
    while len(texts) < minimum:
        parts = []
        for _ in range(rng.randint(2, 14)):
            kind = rng.random()
            if kind < 0.45:
                parts.append(rng.choice(pieces))
            elif kind < 0.6:
                parts.append("".join(rng.choices(rng.choice(scripts), k=rng.randint(1, 5))))
            else:
                parts.append(rng.choice(rng.choice(sources)))
            if rng.random() < 0.3:
                parts.append(rng.choice(_SPACES))
        texts.append("".join(parts))
    return texts


def _is_settled(char: str) -> bool:
    # Newer characters are letters to one Unicode version and unassigned to another, and U+0295 changed its category:
    # a difference there tells versions of tables apart, not tokenizers.
    return unicodedata.category(char) != "Cn" and char != "\u0295"


def _letters(first: int, last: int) -> list[str]:
    kinds = ("L", "M", "N")
    chars = map(chr, range(first, last + 1))
    letters = [char for char in chars if _is_settled(char) and unicodedata.category(char)[0] in kinds]
    return letters[:: 1 + len(letters) // 400]


def _vocabulary(tokenizer: Tokenizer, rng: random.Random) -> list[str]:
    ranks = sorted(tokenizer.spec.ranks.items(), key=lambda item: item[1])
    chosen = rng.sample(ranks, min(len(ranks), 6000))
    texts = [piece.decode("utf-8", "ignore") for piece, _ in chosen]
    known = [text for text in texts if text and all(map(_is_settled, text))]
    return known or ["a"]
