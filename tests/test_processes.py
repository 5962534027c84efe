"""Several processes train as one does: same bits, same refusals, same checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import process_groups
import process_training
import pytest
from process_training import ROUTES
from substrates import substrate

import nf_jax
from nf_jax import processes

MODES = {2: "pmap", 3: "shard_map"}  # by the number of processes: each costs a compilation in all of them


class Group(NamedTuple):
    """What a group of processes left."""

    folder: Path
    num: int

    def said(self, index: int) -> dict[str, Any]:
        return json.loads((self.folder / f"{index}.json").read_text())

    def rows(self, run: str = "") -> dict[str, np.ndarray]:
        """Results of all workers, `[W, ...]`."""
        parts = [dict(np.load(self.folder / f"{index}.npz")) for index in range(self.num)]
        names = [name for name in parts[0] if name.startswith("restored ") == bool(run)]
        return {name.removeprefix(run): np.concatenate([part[name] for part in parts]) for name in names}


@pytest.fixture(scope="module", params=MODES)
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Group:
    folder = tmp_path_factory.mktemp("processes")
    process_groups.run(request.param, str(process_training.__file__), str(folder), MODES[request.param])
    return Group(folder, request.param)


def test_lossy_routes_have_the_bits_of_one_process_and_fp32_at_two(group):
    found, expected = group.rows(), process_training.train(group.num, MODES[group.num])
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        is_exact = "exact" in name or "loss" in name  # the loss is of all parameters
        if is_exact and group.num > 2:
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)
        else:
            assert found[name].tobytes() == values.tobytes(), name


def test_workers_agree_bitwise_in_every_process(group):
    rows = group.rows()
    shared = [name for name in rows if "params" in name or "loss" in name]
    assert len(shared) == (len(ROUTES) + 1) * process_training.NUM_STEPS
    for name in shared:
        assert all(row.tobytes() == rows[name][0].tobytes() for row in rows[name]), name


def test_a_checkpoint_of_several_processes_continues_bit_for_bit(group):
    straight, restored = group.rows(), group.rows("restored ")
    assert {name[0] for name in restored} == {"2", "3"}  # the steps after the save
    for name, values in restored.items():
        assert values.tobytes() == straight[name].tobytes(), name


def test_a_difference_is_refused_by_name_on_every_process(group):
    rest = "process 0" if group.num == 2 else "processes 0, 2"
    for index in range(group.num):
        message = group.said(index)["refused"]
        assert "python: " in message and "'3.9.9' on process 1" in message
        assert f"profile: 'name = \"every_route\"' on {rest}; 'name = \"another\"' on process 1" in message
        assert "substrate: '..." in message and "3.9.9' on process 1" in message
        assert "rate: '0' on process 0" in message
        assert "num_workers" not in message and "jax" not in message.replace("nf_jax", "")
        assert "same code, packages, profile and arguments" in message


def test_a_folder_is_shared_if_all_processes_see_its_files(group):
    assert [group.said(index)["shared"] for index in range(group.num)] == [[True, False]] * group.num
    assert not list(group.folder.glob("**/.shared*"))


def test_what_differs_is_shown_from_where_it_differs_and_short():
    long = "a = 1\n" + "b" * 300
    lines = processes.differences([{"x": long + "cd", "y": "1"}, {"x": long + "e", "y": "1"}, {"y": "1"}])
    (line,) = lines
    assert line.startswith("x: ") and line.endswith("on process 2") and len(line) < 300
    lines = processes.differences([{"x": long + "cd"}, {"x": long + "e"}, {"x": long + "e"}])
    tail = "..." + "b" * 40
    assert lines == [f"x: '{tail}cd' on process 0; '{tail}e' on processes 1, 2"]
    assert processes.differences([{"x": "same"}] * 3) == []
    assert processes.differences([{"x": "1"}, {}]) == ["x: '1' on process 0; '<nothing>' on process 1"]


def test_one_process_agrees_with_itself_without_a_collective():
    profile = nf_jax.Profile.static("SIGN")
    plan = nf_jax.plan(profile, {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}, num_workers=8)
    with jax.transfer_guard("disallow"):
        processes.check_agreement(profile, plan, substrate=substrate(8), rate="1")


def test_unequal_numbers_of_devices_are_refused_before_anything_is_sent(monkeypatch):
    class Device(NamedTuple):
        process_index: int

    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "devices", lambda: [Device(i) for i in (0, 1, 1, 2, 2, 2)])
    profile = nf_jax.Profile.static("SIGN")
    plan = nf_jax.plan(profile, {"kernel": jax.ShapeDtypeStruct((64, 64), "float32")}, num_workers=6)
    with pytest.raises(ValueError, match="got 1 on process 0, 2 on process 1, 3 on process 2"):
        processes.check_agreement(profile, plan)
