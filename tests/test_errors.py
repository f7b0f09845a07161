"""The exception tree is what its docstring draws."""

import inspect

from offplan import errors


def test_exit_codes() -> None:
    codes = {
        name: cls.exit_code
        for name, cls in vars(errors).items()
        if inspect.isclass(cls) and issubclass(cls, errors.OffplanError)
    }
    assert codes == {
        "OffplanError": 1,
        "InputError": 2,
        "CheckpointError": 2,
        "UnpackableError": 2,
        "PlanError": 2,
        "ProfileError": 2,
        "ExportError": 2,
        "InfeasibleError": 3,
        "DriftError": 4,
        "MemoryLimitError": 1,
        "HubError": 1,
        "NotANumberError": 1,
    }


def test_every_error_is_drawn() -> None:
    for name, cls in vars(errors).items():
        if inspect.isclass(cls):
            assert name in (errors.__doc__ or "")


def test_infeasible_says_by_how_much() -> None:
    assert errors.InfeasibleError("nothing fits", 5).shortfall_bytes == 5
    assert errors.InfeasibleError("nothing fits").shortfall_bytes is None
