"""Laws of the shadow trace: what was written comes back, and what is no trace is said to be none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shadows import FEW, MLP, PROFILE, info_of, shapes_of, write_shadow

import nf_jax
from nf_jax.shadow_trace import MEASURES, ShadowWriter, is_shadow, read_shadow
from nf_jax.telemetry import ShadowInfo

LEAVES = nf_jax.shadow_plan(PROFILE, shapes_of(MLP), 8, FEW).leaves


def growing(candidate: int, path: str) -> float:
    return candidate + len(path) / 7


def test_what_was_written_comes_back_with_four_digits(tmp_path: Path):
    leaves = LEAVES._replace(fp32_seconds=(0.5,) * 8, seconds=((0.25,) * 8,) * 3)
    wild = info_of(leaves, 3, growing)
    wild = wild._replace(cosine=np.full((3, 8), np.nan), relative_error=np.full((3, 8), np.inf))
    with ShadowWriter(tmp_path / "s.jsonl", "text", leaves, note="kept") as writer:
        written = [info_of(leaves, 2, growing), wild]
        for info in written:
            writer.write(info)
    read = read_shadow(tmp_path / "s.jsonl")
    assert read.leaves == leaves and not read.truncated and is_shadow(tmp_path / "s.jsonl")
    assert read.header["profile"] == "text" and read.header["note"] == "kept"
    assert read.info.step.tolist() == [2, 3]
    for name in MEASURES:
        expected = np.stack([getattr(info, name) for info in written])
        np.testing.assert_allclose(getattr(read.info, name), expected, rtol=1e-3)


def test_only_steps_that_every_divides_are_written_and_none_before_the_first(tmp_path: Path):
    with ShadowWriter(tmp_path / "s.jsonl", "text", LEAVES, every=4) as writer:
        for step in (-1, 0, 1, 4, 7, 8):
            writer.write(info_of(LEAVES, step, growing))
    assert read_shadow(tmp_path / "s.jsonl").info.step.tolist() == [0, 4, 8]


def test_a_torn_end_is_dropped_and_a_run_that_is_resumed_goes_on_there(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    write_shadow(path, growing, num_steps=6)
    path.write_bytes(path.read_bytes()[:-20])
    torn = read_shadow(path)
    assert torn.truncated and torn.info.step.tolist() == [0, 1, 2, 3, 4]
    with ShadowWriter(path, PROFILE.dumps(), LEAVES, resume_step=3) as writer:
        writer.write(info_of(LEAVES, 3, growing))
    assert read_shadow(path).info.step.tolist() == [0, 1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["s.jsonl"]


def test_a_file_of_another_run_is_not_continued(tmp_path: Path):
    path = tmp_path / "s.jsonl"
    write_shadow(path, growing, num_steps=2)
    before = path.read_bytes()
    for options, said in (({}, "expected no such file"), ({"resume_step": 1}, "its profile differ")):
        with pytest.raises(ValueError, match=said):
            ShadowWriter(path, "another", LEAVES, **options)  # type: ignore[arg-type] (one of two)
    with pytest.raises(ValueError, match="its leaves differ"):
        ShadowWriter(path, PROFILE.dumps(), LEAVES._replace(num_workers=4), resume_step=1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("every", [0, -1, 2.0, True])
def test_every_is_a_positive_number(tmp_path: Path, every: Any):
    with pytest.raises(ValueError, match="every: expected a positive"):
        ShadowWriter(tmp_path / "s.jsonl", "text", LEAVES, every=every)


def test_only_one_workers_view_can_be_written(tmp_path: Path):
    info = info_of(LEAVES, 0, growing)
    with ShadowWriter(tmp_path / "s.jsonl", "text", LEAVES) as writer:
        for wrong in (info._replace(step=np.zeros(8)), ShadowInfo(*[np.stack([m] * 2) for m in info])):
            with pytest.raises(ValueError, match=r"nf_jax\.shadow_info"):
                writer.write(wrong)


HEADER = {"nf_jax_shadow": 1, "profile": "p", "leaves": {"paths": []}}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"nf_jax_trace":1}', "expected the header of an nf_jax shadow trace"),
        ("", "expected the header"),
        (json.dumps(HEADER | {"nf_jax_shadow": 2}), "written by a newer"),
        (json.dumps(HEADER), "line 1: expected the leaves of the run"),
    ],
)
def test_what_is_no_shadow_trace_is_said_to_be_none(tmp_path: Path, line: str, said: str):
    (tmp_path / "s.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=said):
        read_shadow(tmp_path / "s.jsonl")


@pytest.mark.parametrize("change", ["wire_bytes", "order", "fp32_bytes"])
def test_a_header_whose_columns_disagree_is_refused(tmp_path: Path, change: str):
    path = tmp_path / "s.jsonl"
    write_shadow(path, growing, num_steps=1)
    header = json.loads(path.read_text().splitlines()[0])
    header["leaves"][change] = header["leaves"][change][:-1]
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(ValueError, match="columns of different lengths"):
        read_shadow(path)


@pytest.mark.parametrize(
    "line", ["{}", "[1]", "nonsense", '{"step":0,"cosine":[[1]],"relative_error":[[1]],'
             '"sign_agreement":[[1]],"residual_ratio":[[1]]}']
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path: Path, line: str):
    path = tmp_path / "s.jsonl"
    write_shadow(path, growing, num_steps=1)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match="line 3: expected"):
        read_shadow(path)
