"""The text that measurements run on: paragraphs of many kinds, as experts specialise by topic.

Part of what a row means: another text routes to other experts, so a change of it is a new `WORKLOAD`.
"""

from __future__ import annotations

WORKLOAD = "text/1"

PARAGRAPHS = (
    "In the spring the river rose over the lower fields, and the farmers moved their cattle up to the old road. "
    "Nobody remembered a flood so early. The miller said that the snow had melted in a single week, and that the "
    "water would be gone by Sunday; but on Sunday it stood a hand higher, and the bridge was closed.",
    "def merge(left, right):\n    out = []\n    i = j = 0\n    while i < len(left) and j < len(right):\n        if "
    "left[i] <= right[j]:\n            out.append(left[i])\n            i += 1\n        else:\n            "
    "out.append(right[j])\n            j += 1\n    return out + left[i:] + right[j:]\n",
    "And it came to pass in those days that a man went up from the valley into the hill country, he and his two "
    "sons, and they carried with them bread and oil. And the elder said unto his father, How far is the city? And "
    "he answered, It is a journey of three days; and they went on together.",
    "A heat pump moves heat instead of making it. The refrigerant boils at a low pressure in the outdoor coil, is "
    "compressed until it is hotter than the water of the radiators, and condenses there. For each kilowatt hour of "
    "electricity three to four arrive in the house; on cold days the factor falls towards two.",
    "春天的早晨，湖面上还有薄雾。老人划着小船，慢慢地靠近对岸。山上的桃花开了，风一吹，花瓣落在水里。他停下来听，远处有人在唱歌，声音很轻，好像从很久以前传来。",
    "Theorem. Every bounded sequence of real numbers has a convergent subsequence. Proof. Let the sequence lie in "
    "[a, b]. Halve the interval; one half holds infinitely many terms. Keep that half, choose a term in it, and "
    "repeat. The lengths (b - a) / 2^n tend to zero, so the chosen terms are a Cauchy sequence, hence they "
    "converge.",
    '{"order": 20418, "customer": {"name": "Ines Maurer", "city": "Graz"}, "items": [{"sku": "A-113", "count": 2, '
    '"price": 14.90}, {"sku": "K-007", "count": 1, "price": 129.00}], "paid": true, "note": null}',
    "Q: My bread comes out dense, with a thick crust. What am I doing wrong?\nA: Most likely the dough is too "
    "young. Let it rise until a finger leaves a dent that fills slowly; at twenty degrees that takes three hours "
    "rather than one. Bake it under a lid for the first twenty minutes, so that the crust stays soft while the "
    "loaf expands.",
    "SELECT c.name, count(*) AS orders, sum(o.total) AS spent\nFROM customers c JOIN orders o ON o.customer_id = "
    "c.id\nWHERE o.created_at >= date '2024-01-01'\nGROUP BY c.name HAVING count(*) > 3\nORDER BY spent DESC LIMIT "
    "20;\n",
    "Der Zug nach Norden fuhr um zehn nach sieben, aber auf dem Bahnsteig stand noch niemand. Eine Durchsage "
    "nannte vierzig Minuten Verspätung. Marta setzte sich auf ihren Koffer und las den Brief zum dritten Mal; er "
    "war kurz, und doch verstand sie ihn jedes Mal anders.",
    "The court held that the notice was sufficient. A tenant who has been told in writing of the defect, and who "
    "has had thirty days to remedy it, cannot later claim surprise. The question whether the defect was material "
    "was left to the jury, and we see no reason to disturb its finding.",
    "Mitochondria carry their own DNA, a ring of some sixteen thousand base pairs, inherited from the mother "
    "alone. Thirteen of its genes code for proteins of the respiratory chain; the other parts of that machinery "
    "are built from nuclear genes and imported through two membranes.",
    "static int parse(const char *s, size_t n, uint32_t *out)\n{\n    uint32_t value = 0;\n    if (n == "
    "0)\n        return -EINVAL;\n    for (size_t i = 0; i < n; i++) {\n        if (s[i] < '0' || s[i] > "
    "'9')\n            return -EINVAL;\n        value = value * 10 + (s[i] - '0');\n    }\n    *out = value;\n    "
    "return 0;\n}\n",
    "Les marchands arrivaient avant l'aube avec leurs charrettes, et la place se remplissait de voix. On y vendait "
    "des oignons, du poisson, des livres anciens; un homme aiguisait des couteaux près de la fontaine. À midi il "
    "ne restait que des feuilles de chou et quelques chiens.",
    "Release notes, 4.2: the scheduler no longer wakes idle workers for timers that were cancelled; log files are "
    "rotated by size as well as by age; --dry-run prints the plan in the order in which it would be carried out. "
    "Fixed: a crash when the configuration directory is a broken link; wrong totals in months with a leap day.",
    "Captain's log. Wind south-west, force six, sea rough. At four bells we sighted the light and bore away two "
    "points. The carpenter reports nine inches in the well; both pumps are manned. If it holds we shall make the "
    "harbour by noon, and if it does not, God help us on that lee shore.",
    "昨日の夜、雨が降り始めた。駅前の本屋はもう閉まっていたが、二階の窓にはまだ明かりがついていた。傘を持たない学生が三人、軒下で黙って空を見上げている。",
    "Let x be the number of adults and y the number of children. Then x + y = 86 and 12x + 7y = 857. From the "
    "first, y = 86 - x, so 12x + 602 - 7x = 857, 5x = 255 and x = 51. There were 51 adults and 35 children; check: "
    "612 + 245 is 857.",
    "The violin enters alone, without vibrato, on a note held so long that one begins to doubt it. Only when the "
    "cello answers a tenth below does it become a melody. The second movement is a dance in five, the third a set "
    "of variations in which the theme is never heard in full.",
    "# Makefile\nCFLAGS += -O2 -Wall -Wextra\nOBJS = main.o table.o hash.o\n\nall: lookup\n\nlookup: $(OBJS)\n"
    "\t$(CC) $(LDFLAGS) -o $@ $^\n\n%.o: %.c table.h\n\t$(CC) $(CFLAGS) -c -o $@ $<\n\nclean:\n\trm -f lookup "
    "$(OBJS)\n",
    "Твёрдая земля осталась позади, и берег стал узкой полосой. Ветер дул ровно, парус был полон, и рулевой запел "
    "старую песню. Никто не говорил о том, что ждёт их за островами.",
    "Patient, 54, presents with intermittent chest tightness on exertion over six weeks, relieved by rest. No "
    "nausea. Blood pressure 148/92, pulse 76 and regular. The resting ECG shows no changes. Plan: troponin, "
    "lipids, exercise test; start low-dose aspirin; review in one week, or at once if the pain comes at rest.",
    "The volcano had slept for four hundred years when the springs on its southern slope turned warm. In the "
    "second week small earthquakes came in swarms, hundreds a day, each too weak to feel. Geologists set up "
    "tiltmeters on the rim: the mountain was rising, two millimetres a day, and then five.",
    "Once upon a time a fox found a mirror in the forest. She had never seen one, and she bowed politely to the "
    "stranger. The stranger bowed too. 'At last,' thought the fox, 'somebody with manners,' and she told everybody "
    "that she had met a queen.",
)
