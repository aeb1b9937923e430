"""Records the rounds of the fault campaigns in a file, and writes a table of them.

AXIAL_ROUNDS=rounds.jsonl scripts/test.sh -m slow tests/faults              skips rounds that the file records
python tests/faults/rounds.py rounds.jsonl experiments/results/checks.md    writes the table
"""

import collections
import json
import os
import sys

TINY = ("--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin")
FILE = os.environ.get("AXIAL_ROUNDS")
CODES = {0: "finished", 2: "one line, exit code 2", 42: "preempted, exit code 42"}


def done(campaign, kind, number):
    """Returns whether the file records a round."""
    return [campaign, kind, number] in [row[:3] for row in read(FILE)]


def end(campaign, kind, number, code):
    """Records a passed round and the exit code of the round's command."""
    if FILE:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps([campaign, kind, number, code]) + "\n")


def read(path):
    if not path or not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def table(rows):
    """Returns a Markdown table of the number of rounds of each kind and outcome. `rows`: see `end`."""
    counts = collections.Counter((campaign, kind, CODES.get(code, "died")) for campaign, kind, _, code in rows)
    columns = *CODES.values(), "died"
    lines = [f"| campaign | kind | rounds | {' | '.join(columns)} |", f"| {' | '.join(['---'] * 7)} |"]
    for row in sorted({key[:2] for key in counts}):
        cells = [counts[(*row, column)] for column in columns]
        lines.append(f"| {' | '.join(map(str, [*row, sum(cells), *cells]))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.append("experiments/paper")
    from pages import write_block

    write_block(sys.argv[2], "faults", table(read(sys.argv[1])))
