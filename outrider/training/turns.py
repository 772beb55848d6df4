"""Puts together turns of a user: many kinds of request, about many things, in many forms.

A draft knows what it was trained on. A small target that is left to ask itself asks much the same things; these turns
are wider. They are English, and none of them is taken from anywhere: `turns.toml` has the templates and the words.
"""

import random
import re
import tomllib
from pathlib import Path

SOURCE = Path(__file__).with_name("turns.toml")
ENDING_SHARE = 0.2
"""Share of turns that end with a wish about the answer's form."""
_PLACE = re.compile(r"{(\w+)}")
_TRIES = 50
"""Turns drawn for each that is wanted, at most: few of them have been there before."""


def turns(count: int, seed: int) -> list[str]:
    """Return different turns; the kinds of request take their turn, everything else is drawn.

    Args:
        count: How many; fewer are returned where there are not as many.
        seed: Of the choice. The first turns do not depend on the count.
    """
    rng, lists = random.Random(seed), _lists()
    kinds, words, endings = lists["templates"], lists["words"], lists["endings"]["all"]
    found: dict[str, None] = {}
    for drawn in range(count * _TRIES):
        if len(found) == count:
            break
        template = rng.choice(list(kinds.values())[drawn % len(kinds)])
        if rng.random() < ENDING_SHARE:
            template = f"{template} {rng.choice(endings)}"
        found[_filled(template, words, rng)] = None
    return list(found)


def _lists() -> dict[str, dict[str, list[str]]]:
    """Return the entries of each list of each section."""
    sections: dict[str, dict[str, str]] = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return {
        section: {name: lines.strip().splitlines() for name, lines in lists.items()}
        for section, lists in sections.items()
    }


def _filled(template: str, words: dict[str, list[str]], rng: random.Random) -> str:
    """Put words into a template's places, each place its own."""

    def word(place: re.Match[str]) -> str:
        name = place[1]
        return str(rng.randint(2, 99)) if name == "number" else rng.choice(words[name])

    text = _PLACE.sub(word, template)
    return text[0].upper() + text[1:]
