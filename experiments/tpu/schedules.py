"""Reads libtpu's schedule of a Pallas kernel: how often each bundle of instructions runs, and which units it uses.

A bundle starts several instructions in one cycle. Most instructions keep their unit busy for one cycle. The
instructions of the matrix and shuffle units keep them busy for several cycles. `BUSY` has these numbers of cycles. They
are the most frequent distances of two such instructions on one unit, in libtpu's schedules of the attention kernels.
The numbers of units are the largest numbers of such instructions in one bundle, or the names of the units.
"""

import collections
import re

from axial.errors import InputError

# Dict from each kind of instruction to a pattern of its opcodes. The first pattern that matches decides. The kind ''
# has the instructions of the sequencer and of masks, which have slots of their own.
KINDS = {
    "matrix": r"vmatmul",  # the product of 16 rows with the weights in a unit
    "turned weights": r"vmatpush.*xpose",  # 16 rows of weights, which the unit transposes
    "weights": r"vmatpush",
    "shuffle": r"v(?!pop)\S*\.xlu",  # rotations and transposes
    "results": r"vpop",
    "load": r"vld",
    "store": r"vst(?!v)",
    "exponential": r"v(?:pow2|rcp|log2|rsqrt|tanh)",
    "": r"vm(?!ul|ax|in|ov)|v(?:sync|trace|delay|wait|set|stv|cmask|push|nop)|[^v]",
    "vector": r"v",
}
_V5 = {"matrix": 16 / 4, "turned weights": 8 / 4, "weights": 4 / 4, "shuffle": 8 / 3, "store": 1}
_ALL = {"vector": 1 / 4, "load": 1 / 3, "results": 1 / 2, "exponential": 1}
# Dict from each generation to cycles of an instruction / number of units, for each kind.
BUSY = {
    "v5e": _V5 | _ALL,
    "v5p": _V5 | _ALL,
    "v6e": {"matrix": 8 / 2, "turned weights": 8 / 2, "weights": 4 / 2, "shuffle": 4 / 2, "store": 1 / 2} | _ALL,
}


def weighted_bundles(schedule):
    """Returns a list of (bundle, number of times that it runs). A loop's bundle runs once per iteration.

    All code under a condition counts. The grid is a loop too. A loop begins at a bundle with 'LB', which names the
    regions that start there, and ends with a branch to one of these regions. The branch compares a counter with the
    number of iterations. A loop whose number of iterations the chip computes counts once: the compiler adds such loops
    to copy the rest of a block.

    Args:
        schedule: text of a file with the kernel's bundles, as libtpu writes it.

    Raises:
        InputError: a backward branch does not depend on such a comparison.
    """
    bundles = re.findall(r"^ *(?:0x)?[0-9a-f]+ +((?:[A-Z]{2} *)*): *>* *(\{.*)", schedule, re.MULTILINE)
    test = re.compile(r"(%p\w+) = scmp\.ge\.s32\.totalorder (?:\([^)]*\), )?%\w+, (\d+|%\w+)")
    starts, tests, turns = {}, {}, [1] * len(bundles)
    for i, (marks, bundle) in enumerate(bundles):
        if "LB" in marks:
            starts |= dict.fromkeys(re.findall(r"Start region (\d+)", bundle), i)
        tests |= {name: int(limit) if limit.isdigit() else 1 for name, limit in test.findall(bundle)}
        for name, region in re.findall(r"sbr\.rel \(!(%p\w+)\) target = \$region(\d+)", bundle):
            if region not in starts:
                continue  # a forward branch
            if name not in tests:
                raise InputError(f"a kernel's schedule has a loop whose turns are not named: {name}")
            for j in range(starts[region], i + 1):
                turns[j] *= tests[name]
    return [(bundle, times) for (_, bundle), times in zip(bundles, turns, strict=True)]


def count(schedule):
    """Returns a `Counter` of the 'bundles' that a kernel runs, of its instructions of each kind, and of its 'spills'.

    Spills are the stores and loads of numbers for which the registers have no room. They also count as stores and
    loads. For `schedule` and errors see `weighted_bundles`.
    """
    counts = collections.Counter()
    for bundle, times in weighted_bundles(schedule):
        counts["bundles"] += times
        for text in re.sub(r"/\*.*?\*/", "", bundle).strip("{ }").split(";;"):
            if opcode := re.match(r"\s*(?:%\S+(?:, %\S+)* = )?(\S+)", text):
                kind = next(kind for kind, pattern in KINDS.items() if re.match(pattern, opcode[1]))
                counts[kind] += times
                counts["spills"] += times * ("_spill]" in text)
    del counts[""]
    return counts


def busy(counts, generation):
    """Returns a dict from each kind of instruction to the cycles for which a kernel keeps its units busy, descending.

    The least of all schedules with these instructions takes as many cycles as the first kind.
    """
    cycles = {kind: counts[kind] * each for kind, each in BUSY[generation].items()}
    return dict(sorted(cycles.items(), key=lambda item: -item[1]))
