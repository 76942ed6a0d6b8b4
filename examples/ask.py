"""Ask a container one question from Python, and see where the time went.

python examples/ask.py build/nano-glm.waste "What does the os module do?"
"""

import sys

from waste import Engine

path, question = sys.argv[1:]
with Engine.open(path, ram="1GiB") as engine:
    answer = engine.generate(question, max_tokens=96, temperature=0.0)
print(answer.text)
print(
    f"{answer.prompt_tokens} + {answer.completion_tokens} tokens, {answer.decode_tokens_per_s:.1f} tok/s, "
    f"{answer.expert_hits} expert hits, {answer.expert_misses} misses",
    file=sys.stderr,
)
