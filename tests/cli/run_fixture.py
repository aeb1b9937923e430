"""A run of one step, and its export, which the tests of several files share."""

import pytest

TINY = (
    "--gin_file=sample/overfit.gin",
    "--gin_file=tiny/panoptic.gin",
    "--gin_binding=ModelConfig.arguments = {'repeats': (1, 0, 0, 0)}",  # a network of one block is traced sooner
)


@pytest.fixture(scope="session")
def trained(command, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "model"
    result = command("train", *TINY, f"--model_dir={path}", "--gin_binding=TrainingConfig.eval_interval = 1")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-3:-1] == [
        f"trained: {path}/ckpt-1; the best one of its evaluations: {path}/best/ckpt-1",
        f"To score it: axial-evaluate --model_dir={path}",
    ]
    # In a log no line is drawn over another one.
    assert "\r" not in result.err and "compiling the first step" in result.err
    return path


@pytest.fixture(scope="session")
def exported(command, trained):
    path = trained.parent / "export"
    result = command("export", f"--model_dir={trained}", f"--output_dir={path}")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == f"exported {path}"
    assert f"writing saved_model for {path}" in result.err and "comparing it with the checkpoint" in result.err
    return path
