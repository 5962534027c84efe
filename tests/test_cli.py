"""Laws of the command line: it shows what the library computes, and errors are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import shadows
import substrates

import nf_jax
from nf_jax import cli, costs
from nf_jax.endpoint import Endpoint
from nf_jax.profile import Codec, Leaf, Model, Phase, Profile, Region, Target
from nf_jax.trace import TraceWriter

PROFILE = Profile(
    name="small",
    regions=(
        Region(name="head", pattern="head/.*"),
        Region(name="backbone", pattern=".*", codec=Codec(scale="leaf")),
    ),
    phases=(
        Phase(start_step=0, routes={"head": nf_jax.Route.FP32, "backbone": nf_jax.Route.FP32}),
        Phase(start_step=2, routes={"backbone": nf_jax.Route.SIGN}),
    ),
    health={"warmup_steps": 0},  # type: ignore[arg-type] (pydantic takes a dict)
    target=Target(metric="accuracy", reference=90.0, tolerance=1.0, higher_is_better=True),
)


def params() -> dict[str, jax.Array]:
    return {"head/kernel": jnp.zeros((64, 10)), "body/kernel": jnp.zeros((256, 256))}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    PROFILE.save(path)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *args: object) -> None:
    monkeypatch.setattr(sys, "argv", ["nf-jax", *map(str, args)])
    monkeypatch.setenv("COLUMNS", "200")
    cli.main()


def test_inspect_shows_the_bytes_of_the_plan(profile, monkeypatch, capsys):
    run(monkeypatch, "inspect", profile, "-w", 4, "--params", "test_cli:params")
    shown = capsys.readouterr().out
    plan = nf_jax.plan(PROFILE, params(), 4)
    routes = [PROFILE.route_table[1][1][region] for region in plan.lanes.regions]
    assert f"{plan.wire_bytes(routes):,}" in shown
    for row, name in zip(plan.lanes.wire_bytes, plan.lanes.names, strict=True):
        assert name in shown
        assert f"{row[nf_jax.Route.FP32]:,}" in shown


def test_validate_accepts_the_shipped_profiles(monkeypatch, capsys):
    shipped = sorted((Path(__file__).parent.parent / "profiles").glob("*.toml"))
    run(monkeypatch, "validate", *shipped)
    assert capsys.readouterr().out.count("good") == len(shipped) > 0


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("validate", "missing.toml"), "missing.toml"),
        (("inspect", "{profile}"), "--params"),
        (("inspect", "{profile}", "--params", "test_cli:nothing"), "test_cli:nothing"),
        (("report", "{folder}"), "trace.jsonl"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_1(args, said, profile, monkeypatch, capsys):
    filled = [arg.format(profile=profile, folder=profile.parent) for arg in args]
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *filled)
    assert stopped.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("nf-jax: ") and said in error and "Traceback" not in error


def test_inspect_with_a_substrate_shows_seconds_and_why_not(profile, tmp_path, monkeypatch, capsys):
    slow = substrates.stage(1.0, 0.0)
    for name, stages in {"fast": {}, "slow": {"sign": slow}}.items():
        substrates.substrate(4, **stages).save(tmp_path / f"{name}.toml")
        asked = ("--params", "test_cli:params", "--substrate", tmp_path / f"{name}.toml")
        run(monkeypatch, "inspect", profile, "-w", 4, *asked)
        shown = capsys.readouterr().out
        assert "predicted milliseconds" in shown and ("slower" in shown) == (name == "slow")
    lanes = nf_jax.plan(PROFILE, params(), 4).lanes
    seconds = costs.lane_seconds(PROFILE, lanes, substrates.substrate(4, sign=slow))
    assert f"{1e3 * seconds[0][nf_jax.Route.SIGN]:.3f}" in shown


def write_run(folder: Path, num_steps: int, profile: Profile = PROFILE) -> None:
    tx = nf_jax.aggregate_gradients(profile, axis="batch", num_workers=2)
    step = jax.pmap(lambda g, s: tx.update(g, s, value=jnp.float32(1)), "batch", devices=jax.devices()[:2])
    grads, state = jax.tree.map(lambda x: jnp.stack([x, x]), (params(), tx.init(params())))
    folder.mkdir()
    lanes = nf_jax.plan(profile, params(), 2).lanes
    with TraceWriter(folder / "trace.jsonl", profile.dumps(), lanes, num_workers=2) as trace:
        for _ in range(num_steps):
            _, state = step(grads, state)
            trace.write(nf_jax.step_info(state))


def test_report_says_what_a_run_did_and_draws_it(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "guided-0", num_steps=6)
    rows = '[{"policy": "guided", "seed": 0, "metric": "accuracy", "value": 88.5}]'
    (tmp_path / "summary.json").write_text(rows)
    run(monkeypatch, "report", tmp_path)
    shown = capsys.readouterr().out
    assert "66.7%" in shown  # 4 of 6 steps were low-bit
    assert "missed: 88.50 against 90.00 +- 1.00" in shown
    picture = (tmp_path / "guided-0" / "trace.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


def test_report_reads_a_torn_trace_and_says_so(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "guided-0", num_steps=3)
    trace = tmp_path / "guided-0" / "trace.jsonl"
    trace.write_bytes(trace.read_bytes()[:-20])
    run(monkeypatch, "report", "--no-plots", tmp_path)
    assert "cut off" in capsys.readouterr().out


MODEL = Model(
    name="small", leaves=tuple(Leaf(path=k, shape=v.shape, dtype="float32") for k, v in params().items())
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "run"
    write_run(folder, 6, PROFILE.model_copy(update={"model": MODEL}))
    return folder / "trace.jsonl"


def test_replay_says_whether_the_run_decides_again_as_it_did(trace, tmp_path, monkeypatch, capsys):
    run(monkeypatch, "replay", trace)
    assert "every decision is the recorded one" in capsys.readouterr().out
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(trace.read_bytes()[:-20])
    run(monkeypatch, "replay", torn)
    assert "replayed up to its last whole step" in capsys.readouterr().out


def test_replay_sweeps_draws_and_writes_a_profile(trace, tmp_path, monkeypatch, capsys):
    Endpoint(name="switch").save(tmp_path / "e.toml")
    few = {"link": [1e7, 1e9], "workers": [2, 4], "cap": [2**20, 2**22]}
    monkeypatch.setattr("nf_jax.sweep.default_values", lambda case: few)
    monkeypatch.setattr(cli, "default_values", lambda case: few)
    options = ("--endpoint", tmp_path / "e.toml", "--out", tmp_path / "out", "--what-if")
    run(monkeypatch, "replay", trace, *options, "--write-profile", tmp_path / "p.toml")
    shown = capsys.readouterr().out
    assert "times as fast as all in FP32" in shown and "bucket cap" in shown
    assert (tmp_path / "out" / "what-if.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "out" / "steps.csv").read_text().splitlines()) == 7
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["steps"] == 6 and 0 < summary["wire_fraction"] < 1 < summary["speedup"]
    assert Profile.load(tmp_path / "p.toml").model == MODEL


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("nothing.jsonl",), "cannot open it"),
        (("{trace}", "--endpoint", "{trace}"), "expected valid TOML"),
        (("{trace}", "--what-if"), "expected --substrate or --endpoint with them"),
        (("{trace}", "--write-profile", "p.toml"), "expected --substrate or --endpoint with them"),
    ],
)
def test_a_replay_that_cannot_be_is_one_line(args, said, trace, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, "replay", *(arg.format(trace=trace) for arg in args))
    assert stopped.value.code == 1
    assert said in capsys.readouterr().err


def test_report_takes_a_single_trace(tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "guided-0", num_steps=3)
    run(monkeypatch, "report", "--no-plots", tmp_path / "guided-0" / "trace.jsonl")
    shown = capsys.readouterr().out
    assert "trace" in shown and "33.3%" in shown  # one of three steps was low-bit


def test_validate_looks_at_every_profile(profile, tmp_path, monkeypatch, capsys):
    bad = tmp_path / "bad.toml"
    bad.write_text("name = 3\n")
    with pytest.raises(SystemExit):
        run(monkeypatch, "validate", bad, profile)
    shown = capsys.readouterr()
    assert "bad.toml" in shown.err and f"{profile}: good" in shown.out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("probe", "--out", "{folder}"), "expected a file that can be written"),
        (("probe", "--out", "{folder}/s.toml", "--devices", "0"), "devices: expected at least 1"),
        (("replay", "{trace}", "--compute-seconds", "nan"), "compute_seconds: expected a finite number"),
        (("replay", "{trace}", "--out", "{trace}"), "expected a file that can be written"),
        (("replay", "{trace}", "--endpoint", "{substrate}"), "or to a file of another kind"),
    ],
)
def test_what_cannot_work_is_said_before_the_work(args, said, tmp_path, monkeypatch, capsys):
    write_run(tmp_path / "guided-0", num_steps=2)
    substrates.substrate(2).save(tmp_path / "substrate.toml")
    names = {
        "folder": tmp_path,
        "trace": tmp_path / "guided-0" / "trace.jsonl",
        "substrate": tmp_path / "substrate.toml",
    }
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *(arg.format(**names) for arg in args))
    assert stopped.value.code == 1 and said in capsys.readouterr().err


def test_report_says_what_a_shadow_run_found_safe_and_writes_the_profile(tmp_path, monkeypatch, capsys):
    shadows.write_shadow(tmp_path / "shadow.jsonl", lambda c, p: 0.1 if c == 0 else 9.0)
    options = ("--write-profile", tmp_path / "p.toml", "--warmup-steps", 10)
    run(monkeypatch, "report", tmp_path, *options)
    shown = capsys.readouterr().out
    assert "safe to admit: head, first, early, late (BF16); stays in FP32: bias. Saves" in shown
    assert "from 10 on" in shown and (tmp_path / "shadow.png").read_bytes().startswith(b"\x89PNG")
    assert Profile.load(tmp_path / "p.toml").route_table[0][1][0] == nf_jax.Route.BF16
    substrates.substrate(8).save(tmp_path / "substrate.toml")
    run(monkeypatch, "report", "--no-plots", tmp_path, "--substrate", tmp_path / "substrate.toml")
    assert "ms a step" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("report", "{folder}"), "at least 5 finite steps from step 20 on, got 0"),
        (("report", "{folder}", "--write-profile", "{folder}"), "expected a file that can be written"),
        (("report", "{profile}", "--write-profile", "p.toml"), "expected one shadow trace"),
    ],
)
def test_a_shadow_that_cannot_be_judged_is_one_line(args, said, profile, tmp_path, monkeypatch, capsys):
    shadows.write_shadow(tmp_path / "shadow.jsonl", lambda c, p: 1.0, num_steps=20)
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, *(arg.format(folder=tmp_path, profile=profile) for arg in args))
    assert stopped.value.code == 1 and said in capsys.readouterr().err


def test_help_lists_a_sentence_each_and_a_command_tells_all(monkeypatch, capsys):
    def help_of(*args: str) -> str:
        monkeypatch.setattr("sys.argv", ["nf-jax", *args, "--help"])
        with pytest.raises(SystemExit, match="0"):
            cli.main()
        return capsys.readouterr().out

    assert "calibrate" in help_of() and "def measure" not in help_of()
    assert "def measure" in help_of("calibrate")
