"""Perplexity of a text under a model: one prefill with the logits of every position.

python examples/score_text.py build/nano-glm.waste examples/nano-glm/README.md
"""

import sys
from pathlib import Path

import numpy as np

from waste import Engine

path, text = sys.argv[1:]
with Engine.open(path, ram="1GiB") as engine:
    ids = engine.tokenizer.encode(Path(text).read_text(encoding="utf-8"))[: engine.context]
    logits = engine.session().eval(ids, all_logits=True).astype(np.float64)
logits -= logits.max(-1, keepdims=True)
logprob = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
loss = -logprob[np.arange(len(ids) - 1), ids[1:]].mean()
print(f"{len(ids)} tokens, loss {loss:.3f}, perplexity {np.exp(loss):.1f}")
