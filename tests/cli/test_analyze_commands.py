"""What the verbs of axial-analyze that know a TPU refuse: input, ops, pod, tpu."""

import pytest

REFUSED = {
    "--slice=v9:1x1: no clock of v9 is known": ("input", "--cycles=1e9", "--slice=v9:1x1"),
    "--only needs --all": ("ops", "--only=coco"),
    "--host_images": ("pod", "--host_images=0"),
    "--layer=65: wants rows x length, like 258x65": ("tpu", "--layer=65"),
    "--parts does not go with --layer": ("tpu", "--layer=258x65", "--parts"),
    "--suite=systems: axial-analyze tpu takes --suite=study": ("tpu", "--suite=systems"),
    "--suite=runtime: axial-analyze tpu takes --suite=study": ("tpu", "--suite=runtime"),
    "--batch does not go with --suite": ("tpu", "--suite=study", "--batch=2"),
    "--csv needs --all": ("tpu", "--csv={}/tpu.csv"),
    "--batch does not go with --all": ("tpu", "--all", "--csv={}/tpu.csv", "--batch=1"),
    "--only=axial_q: no recipe has this in its name": ("tpu", "--all", "--csv={}/tpu.csv", "--only=axial_q"),
    "--parts: no speed of the memory of v2:2x2 is known": ("tpu", "--parts", "--slice=v2:2x2"),
    "TrainingConfig.accumulate = 2: does not divide 1, a replica's batch": (
        *("tpu", "--batch=1", "--gin_binding=TrainingConfig.accumulate = 2"),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused_is_one_line(command, tmp_path, message):
    result = command("analyze", *(text.format(tmp_path) for text in REFUSED[message]))
    assert result.code == 2 and message in result.line, result.err
