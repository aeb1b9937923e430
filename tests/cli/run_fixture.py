"""A run of one step, and its export, which the tests of several files share."""

import pytest

TINY = ("--gin_file=sample/overfit.gin", "--gin_file=tiny/panoptic.gin")


@pytest.fixture(scope="session")
def trained(command, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "model"
    result = command("train", *TINY, f"--model_dir={path}", "--gin_binding=TrainingConfig.eval_interval = 1")
    assert result.code == 0, result.err
    return path


@pytest.fixture(scope="session")
def exported(command, trained):
    path = trained.parent / "export"
    result = command("export", f"--model_dir={trained}", f"--output_dir={path}")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == f"exported {path}"
    return path
