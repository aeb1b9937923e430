"""The campaigns' record, and its table.

AXIAL_ROUNDS=rounds.jsonl scripts/test.sh -m slow tests/faults            rounds that the file has are skipped
python tests/faults/rounds.py rounds.jsonl experiments/RESULTS.md         writes the table
"""

import collections
import json
import os
import sys

TINY = ("--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin")
FILE = os.environ.get("AXIAL_ROUNDS")
COLUMNS = ("finished", "one line, exit code 2", "preempted, exit code 42", "died")


def done(campaign, kind, number):
    """Whether the record has a round."""
    return [campaign, kind, number] in [row[:3] for row in read(FILE)]


def end(campaign, kind, number, code):
    """Writes that a round was passed, and the exit code of its command."""
    if FILE:
        with open(FILE, "a", encoding="utf-8") as file:
            file.write(json.dumps([campaign, kind, number, code]) + "\n")


def read(path):
    if not path or not os.path.exists(path):
        return []
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.endswith("\n")]


def outcome(code):
    return {0: COLUMNS[0], 2: COLUMNS[1], 42: COLUMNS[2]}.get(code, COLUMNS[3])


def table(rows):
    """Markdown of how many rounds of each kind ended in which way."""
    counts = collections.defaultdict(collections.Counter)
    for campaign, kind, _, code in rows:
        counts[campaign, kind][outcome(code)] += 1
    lines = [
        f"| campaign | kind | rounds | {' | '.join(COLUMNS)} |",
        f"| {' | '.join(['---'] * (3 + len(COLUMNS)))} |",
    ]
    for (campaign, kind), found in sorted(counts.items()):
        cells = [campaign, kind, found.total(), *(found[column] for column in COLUMNS)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    from axial.io.write import write_block

    write_block(sys.argv[2], "faults", table(read(sys.argv[1])))
