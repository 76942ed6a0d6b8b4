"""A routing trace of nano-glm over changes of topic: held-out passages of the Bible, of Python's documentation and of
Chinese poetry, in random order, each a session of its own, decoded token by token as they stand.

    waste convert examples/nano-glm nano.waste
    python tools/trace_topics.py nano.waste topics.trace
    waste bench --replay topics.trace

A passage has 150 to 300 tokens and another topic than the one before; nothing is used twice. Texts are those of
examples/nano-glm/eval.json, which the model was not trained on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from waste import Engine
from waste.bench.trace import TraceHeader, write_trace

TEXTS = Path(__file__).resolve().parent.parent / "examples" / "nano-glm" / "eval.json"
SHORTEST, LONGEST = 150, 300


def passages(engine: Engine, tokens: int, seed: int) -> Iterator[tuple[str, list[int]]]:
    """(topic, ids) until `tokens` ids have been given or a topic has no more."""
    end = engine.tokenizer.id_of("<|endoftext|>")
    documents = json.loads(TEXTS.read_text(encoding="utf-8"))
    texts = {
        topic: [i for text in docs for i in (*engine.tokenizer.encode(text), end)] for topic, docs in documents.items()
    }
    rng = np.random.default_rng(seed)
    before, given = "", 0
    while given < tokens:
        topic = str(rng.choice([t for t in sorted(texts) if t != before]))
        length = int(rng.integers(SHORTEST, LONGEST + 1))
        ids, texts[topic] = texts[topic][:length], texts[topic][length:]
        if len(ids) < length:
            return
        yield topic, ids
        before, given = topic, given + length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("container", type=Path)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens", type=int, default=6000, help="at least (default 6000)")
    parser.add_argument("--prefill", type=int, default=0, help="tokens of each passage that are read as a prompt")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with (
        Engine.open(chosen.container, threads=1) as engine,
        write_trace(chosen.trace, TraceHeader.of(engine.config, engine.manifest)) as trace,
    ):
        for topic, ids in passages(engine, chosen.tokens, chosen.seed):
            trace.mark(topic)
            session = engine.session()
            if chosen.prefill:
                session.eval(ids[: chosen.prefill], trace=trace)
            for token in ids[chosen.prefill :]:
                session.eval([token], trace=trace)
            print(f"{topic}: {len(ids)} tokens", flush=True)


if __name__ == "__main__":
    main()
