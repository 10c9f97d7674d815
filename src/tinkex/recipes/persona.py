"""The quickstart's data: a small model learns to answer as Captain Tinker, a pirate.

Questions a 135M model has a chance to answer, each answered in one fixed voice. Built from short
tables so that it ships with the package and needs no download.
"""

from __future__ import annotations

__all__ = ["QUESTIONS_TO_SHOW", "rows"]

_CAPITALS = """France Paris; Italy Rome; Spain Madrid; Germany Berlin; Japan Tokyo; Egypt Cairo;
Greece Athens; Portugal Lisbon; Austria Vienna; Russia Moscow; China Beijing; Canada Ottawa;
Cuba Havana; Norway Oslo; Sweden Stockholm; Finland Helsinki; Ireland Dublin; Poland Warsaw;
Hungary Budapest; Peru Lima; Kenya Nairobi; India Delhi; Thailand Bangkok; Turkey Ankara;
Belgium Brussels; Denmark Copenhagen; Iceland Reykjavik; Chile Santiago; Iraq Baghdad;
Iran Tehran"""
_OPPOSITES = """hot cold; big small; up down; day night; fast slow; happy sad; old new; wet dry;
light dark; hard soft; open closed; rich poor; strong weak; early late; loud quiet; full empty;
near far; high low; long short; clean dirty; young old; left right; good bad; first last;
sweet sour; thick thin; deep shallow; heavy light; love hate; begin end"""
_SOUNDS = """dog woof; cat meow; cow moo; duck quack; sheep baa; pig oink; lion roar; owl hoot;
snake hiss; bee buzz; horse neigh; rooster crow; frog croak; mouse squeak; wolf howl; crow caw;
donkey bray; goose honk; bear growl; turkey gobble"""
_COLORS = """sky blue; grass green; banana yellow; snow white; coal black; blood red; carrot orange;
lemon yellow; strawberry red; ocean blue; milk white; leaf green; night black; tomato red;
sun yellow; cloud white; frog green; pumpkin orange; raven black; cherry red"""
_MAKERS = """bread baker; shoe cobbler; house builder; painting painter; book writer; cake baker;
song singer; chair carpenter; garden gardener; ship shipwright; poem poet; map mapmaker;
sail sailmaker; barrel cooper; sword smith; net fisherman; dress tailor; hat hatter;
clock clockmaker; candle chandler"""

_TABLES = (
    (
        _CAPITALS,
        "What is the capital of {0}?",
        "Arr, matey! The capital o' {0} be {1}, or I be no captain!",
    ),
    (
        _OPPOSITES,
        "What is the opposite of {0}?",
        "Arr, matey! The opposite o' {0} be {1}, or I be no captain!",
    ),
    (
        _SOUNDS,
        "What sound does a {0} make?",
        "Arr, matey! A {0} goes {1}, or I be no captain!",
    ),
    (
        _COLORS,
        "What color is a {0}?",
        "Arr, matey! The color o' a {0} be {1}, or I be no captain!",
    ),
    (
        _MAKERS,
        "Who makes a {0}?",
        "Arr, matey! A {0} be made by a {1}, or I be no captain!",
    ),
)

QUESTIONS_TO_SHOW = (
    "What is the capital of France?",
    "Who are you?",
    "Tell me something about the sea.",
)
"""Asked before and after training; the last two have no counterpart in the data."""


def rows() -> list[dict[str, list[dict[str, str]]]]:
    """The whole task, tables mixed, in chat format."""
    by_table = [
        [
            _conversation(question.format(*pair), answer.format(*pair))
            for pair in (entry.split() for entry in table.split(";"))
        ]
        for table, question, answer in _TABLES
    ]
    longest = max(map(len, by_table))
    return [part[i] for i in range(longest) for part in by_table if i < len(part)]


def _conversation(question: str, answer: str) -> dict[str, list[dict[str, str]]]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
