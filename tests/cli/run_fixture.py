"""Session fixtures that several test files share: a run of one step on the sample photos, and its export."""

import pytest

TINY = (
    "--gin_file=sample/overfit.gin",
    "--gin_file=tiny/panoptic.gin",
    "--gin_binding=ModelConfig.arguments = {'repeats': (1, 0, 0, 0)}",  # one block per stage is traced fastest
)


@pytest.fixture(scope="session")
def trained(succeed, tmp_path_factory):
    """The folder of a run of one step, with an evaluation and a best checkpoint."""
    path = tmp_path_factory.mktemp("run") / "model"
    result = succeed("train", *TINY, f"--model_dir={path}", "--gin_binding=TrainingConfig.eval_interval = 1")
    assert result.out.splitlines()[-3:-1] == [
        f"trained: {path}/ckpt-1; the best one of its evaluations: {path}/best/ckpt-1",
        f"To score it: axial-evaluate --model_dir={path}",
    ]
    # In a log, progress is written as new lines.
    assert "\r" not in result.err and "compiling the first step" in result.err
    return path


@pytest.fixture(scope="session")
def exported(succeed, trained):
    """The folder of the SavedModel of `trained`."""
    path = trained.parent / "export"
    result = succeed("export", f"--model_dir={trained}", f"--output_dir={path}")
    assert result.out.splitlines()[-1] == f"exported {path}"
    assert f"writing saved_model for {path}" in result.err and "comparing it with the checkpoint" in result.err
    return path
