"""The flow against a real Prefect server on loopback, over the project's DAG with stages that take milliseconds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import PalimpsestError
from pipeline.graph import edges, read_graph
from pipeline.link import is_alive
from pipeline.reproduce import StageFailed, reproduce
from pipeline.trial import Trial
from tests.browser import CHROMIUM, open_page
from tests.toy import REPOSITORY, make_toy, run, set_key, write_removal_inputs

Starter = Callable[[Path], tuple["subprocess.Popen[str]", str]]


class Server:
    """What the server's API says of a run."""

    def __init__(self, url: str):
        self.url = url

    def ask(self, what: str, **filters: Any) -> list[dict[str, Any]]:
        body = json.dumps({"limit": 200, **filters}).encode()
        request = urllib.request.Request(f"{self.url}/{what}/filter", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def last_run(self, name: str = "palimpsest") -> dict[str, Any]:
        runs = self.ask("flow_runs", sort="START_TIME_DESC", flows={"name": {"any_": [name]}})
        return runs[0]

    def states(self, flow_run: str) -> dict[str, str]:
        """Task name -> state name; the server hears of tasks a moment after the run has ended."""
        end = time.monotonic() + 20
        while True:
            tasks = self.ask("task_runs", flow_runs={"id": {"any_": [flow_run]}})
            states = {task["name"]: task["state_name"] for task in tasks}
            if time.monotonic() > end or (states and not {"Running", "Pending"} & set(states.values())):
                return states
            time.sleep(0.2)

    def task_edges(self, flow_run: str) -> set[tuple[str, str]]:
        tasks = self.ask("task_runs", flow_runs={"id": {"any_": [flow_run]}})
        names = {task["id"]: task["name"] for task in tasks}
        return {(names[one["id"]], task["name"]) for task in tasks for one in task["task_inputs"].get("wait_for", [])}

    def artifacts(self, flow_run: str) -> dict[str, dict[str, Any]]:
        found = self.ask("artifacts", artifacts={"flow_run_id": {"any_": [flow_run]}})
        return {one["description"]: one for one in found}


@pytest.fixture(scope="module")
def start_server() -> Iterator[Starter]:
    """Start `python -m pipeline ui` in a project; it is ended with the tests."""
    started: list[subprocess.Popen[str]] = []

    def start(root: Path) -> tuple[subprocess.Popen[str], str]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        command = [sys.executable, "-m", "pipeline", "ui", "--port", str(port)]
        process = subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said[2].strip() == f"http://127.0.0.1:{port}", said
        return process, f"http://127.0.0.1:{port}/api"

    yield start
    for process in started:
        process.terminate()
        process.wait(timeout=30)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy project in git, with a study."""
    root = make_toy(tmp_path_factory.mktemp("flow"))
    (root / "studies").mkdir()
    plan = {"question": "Which?", "stages": ["evaluation@masked"], "result": "evaluation/masked.json"}
    plan |= {"vary": {"masking.method": ["magnitude", "sparsegpt"]}, "baseline": {"masking.method": "magnitude"}}
    (root / "studies/one.yaml").write_text(json.dumps(plan))
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for command in (["add", "."], ["commit", "--quiet", "-m", "start"]):
        subprocess.run([*git, *command], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def server(project: Path, start_server: Starter) -> Server:
    return Server(start_server(project)[1])


def everything(project: Path) -> list[str]:
    return list(read_graph(project / "dvc.yaml"))


def test_first_run_shows_the_dag_and_every_stage_completed(project: Path, server: Server) -> None:
    done = run(project, "pipeline", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(everything(project))} ran in" in done.stdout and server.url.removesuffix("/api") in done.stdout
    flow_run = server.last_run()
    given = {"targets": [], "overrides": {}, "force": False, "jobs": 2}
    assert flow_run["state_name"] == "Completed" and flow_run["parameters"] == given
    assert server.states(flow_run["id"]) == dict.fromkeys(everything(project), "Completed")
    assert server.task_edges(flow_run["id"]) == edges(read_graph(project / "dvc.yaml"))
    lines = server.ask("logs", logs={"flow_run_id": {"any_": [flow_run["id"]]}})
    assert sum("  working" in line["message"] for line in lines) == len(everything(project))
    assert reproduce(root=project, say=lambda line: None) == dict.fromkeys(everything(project), "unchanged")


def test_cached_and_restored_are_shown_as_such_with_their_tables(project: Path, server: Server) -> None:
    before = (project / "params.yaml").read_bytes()
    set_key(project, "peeling.reach", [1])
    rest = len(everything(project)) - 2
    assert f"{rest} unchanged, 2 ran in" in run(project, "pipeline", "run").stdout
    states = server.states(server.last_run()["id"])
    assert states == dict.fromkeys(everything(project), "Cached") | {"peeling": "Completed", "report": "Completed"}

    (project / "params.yaml").write_bytes(before)
    assert f"{rest} unchanged, 2 restored in" in run(project, "pipeline", "run").stdout
    flow_run = server.last_run()
    states = server.states(flow_run["id"])
    assert states == dict.fromkeys(everything(project), "Cached") | {"peeling": "Restored", "report": "Restored"}

    written = {f"data/{path}" for node in read_graph(project / "dvc.yaml").values() for path in node.writes}
    tables = {path for path in written if path.endswith((".csv", ".json"))}
    pictures = {f"{path}/picture.svg" for path in written if "." not in path}
    artifacts = server.artifacts(flow_run["id"])
    assert set(artifacts) == tables | pictures and len(tables) > 10
    rows = json.loads(artifacts["data/allocation.csv"]["data"])
    word = (project / "data/allocation.csv").read_text().splitlines()[1].split(",")[1]
    assert rows == [{"block": 0, "word": word}, {"block": 1, "word": word}]
    assert artifacts["data/pictures/picture.svg"]["data"].startswith("![picture.svg](data:image/svg+xml;base64,")


def test_nothing_to_do_is_said(project: Path, server: Server) -> None:
    assert f"Nothing to do: {len(everything(project))} unchanged in" in run(project, "pipeline", "run").stdout


def test_a_target_runs_with_what_it_depends_on_and_force_runs_it_again(project: Path, server: Server) -> None:
    done = run(project, "pipeline", "run", "--force", "allocation")
    assert "7 ran in" in done.stdout, done.stdout + done.stderr
    parameters = server.last_run()["parameters"]
    assert (parameters["targets"], parameters["force"]) == (["allocation"], True)
    done = run(project, "pipeline", "run", "alocation")
    assert done.returncode == 1 and "no stage 'alocation'; there are training, model, tokens" in done.stderr


def test_a_failed_stage_fails_its_task_and_nothing_below_it_runs(project: Path, server: Server) -> None:
    set_key(project, "tokens.seed", 5)
    done = run(project, "pipeline", "run", "allocation", "removal", TOY_FAILS="statistics")
    assert done.returncode == 1
    assert done.stderr.strip() == "statistics: data/x.csv: no column 'y'; run z again"
    flow_run = server.last_run()
    assert flow_run["state_name"] == "Failed"
    states = server.states(flow_run["id"])
    for name in ("training", "model"):
        assert states.pop(name) in {"Cached", "Completed"}
    assert states == {
        "tokens": "Completed",
        "capture": "Completed",
        "statistics": "Failed",
        "sensitivity": "NotReady",  # below it
        "allocation": "NotReady",
        "redundancy": "Completed",  # beside it
        "search": "Completed",
        "removal": "Completed",
    }


@pytest.fixture(scope="module")
def deployment(project: Path, server: Server) -> Iterator[str]:
    """What `python -m pipeline serve` has put into the UI."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    process = subprocess.Popen([sys.executable, "-m", "pipeline", "serve"], cwd=project, env=environment, stdout=subprocess.PIPE)
    wait_until(lambda: server.ask("deployments"))
    yield server.ask("deployments")[0]["id"]
    process.terminate()
    process.wait(timeout=60)


def wait_until(there: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (value := there()):
        assert time.monotonic() < end, "not in time"
        time.sleep(0.5)
    return value


def ended(server: Server, flow_run: str) -> dict[str, Any] | None:
    (run,) = server.ask("flow_runs", flow_runs={"id": {"any_": [flow_run]}})
    return run if run["state_type"] in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED") else None


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_button_in_the_ui_starts_a_run_that_shows_every_stage_and_a_picture(
    project: Path, server: Server, deployment: str
) -> None:
    before = {one["id"] for one in server.ask("flow_runs")}
    ui = server.url.removesuffix("/api")
    with open_page() as page:
        page.open(f"{ui}/deployments/deployment/{deployment}")
        page.click("Run")
        page.click("Quick run")
        (new,) = wait_until(lambda: {one["id"] for one in server.ask("flow_runs")} - before)
        assert wait_until(lambda: ended(server, new))["state_name"] == "Completed"
        states = server.states(new)
        assert sorted(states) == sorted(everything(project))

        page.open(f"{ui}/runs/flow-run/{new}")
        page.click("Task Runs")
        for name, state in states.items():
            shown = json.dumps(f"{name}\n{state}\n")
            page.wait_for(f"document.body.innerText.includes({shown})")
        picture = server.artifacts(new)["data/pictures/picture.svg"]["id"]
        page.open(f"{ui}/artifacts/artifact/{picture}")
        page.wait_for("[...document.images].some(one => one.src.startsWith('data:image/svg') && one.naturalWidth > 0)")


def test_a_run_with_overrides_is_an_experiment_and_leaves_the_folder_alone(
    project: Path, server: Server, deployment: str
) -> None:
    before = (project / "params.yaml").read_bytes(), (project / "data/allocation.csv").read_bytes()
    good = start_run(server, deployment, targets=["allocation"], overrides={"allocation.method": "pals"})
    assert wait_until(lambda: ended(server, good))["state_name"] == "Completed"
    states = server.states(good)
    assert states.pop("allocation") == "Completed" and set(states) == {
        "training",
        "model",
        "tokens",
        "capture",
        "statistics",
        "sensitivity",
    }
    assert ((project / "params.yaml").read_bytes(), (project / "data/allocation.csv").read_bytes()) == before
    name = ended(server, good)["name"]  # type: ignore[index]
    assert name in run(project, "dvc", "exp", "list", "--name-only").stdout.split()
    shown = json.loads(server.artifacts(good)["data/allocation.csv"]["data"])
    assert shown[0]["word"] not in before[1].decode()


def test_an_override_that_is_refused_starts_nothing(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(PalimpsestError, match=r"overrides: allocation\.metod: unknown key; did you mean method\?"):
        Trial("name", ["model"], ["model"], {"allocation.metod": "pals"}, force=False)


def start_run(server: Server, deployment: str, **parameters: Any) -> str:
    body = json.dumps({"parameters": parameters}).encode()
    address = f"{server.url}/deployments/{deployment}/create_flow_run"
    with urllib.request.urlopen(urllib.request.Request(address, body, {"Content-Type": "application/json"})) as answer:
        return json.load(answer)["id"]


def test_a_study_is_a_flow_whose_cells_are_tasks_on_dask_workers(project: Path, server: Server) -> None:
    done = run(project, "pipeline", "study", "one", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    flow_run = server.last_run("palimpsest-study")
    assert flow_run["name"] == "study-one" and flow_run["parameters"] == {"study": "one", "workers": 2, "address": None}
    states = server.states(flow_run["id"])
    assert set(states) == {"common stages", "sparsegpt", "magnitude"}
    assert states["sparsegpt"] == states["magnitude"] == "Completed"
    assert server.task_edges(flow_run["id"]) == {("common stages", "sparsegpt"), ("common stages", "magnitude")}
    shown = server.ask("artifacts", artifacts={"flow_run_id": {"any_": [flow_run["id"]]}})
    cell = next(one for one in shown if one["key"] == "one-magnitude")
    assert "masking.method | `magnitude`" in cell["data"] and "| perplexity |" in cell["data"] and cell["task_run_id"]
    assert {one["type"]: one["data"] for one in shown}["progress"] == 100
    (table,) = [json.loads(one["data"]) for one in shown if one["key"] == "study-one" and one["type"] == "table"]
    assert [row["masking"] for row in table] == ["magnitude", "sparsegpt"]


def test_a_plain_stage_reports_when_a_server_is_named(server: Server, tmp_path: Path) -> None:
    light = removal_project(tmp_path)
    done = run(light, "dvc", "repro", "--single-item", "removal", PREFECT_API_URL=server.url, PREFECT_HOME=str(tmp_path / "home"))
    assert done.returncode == 0 and "removal: done in" in done.stdout, done.stdout + done.stderr
    flow_run = server.last_run("palimpsest-stage")
    assert flow_run["name"] == "removal" and flow_run["state_name"] == "Completed"
    assert set(server.artifacts(flow_run["id"])) == {f"data/removal{end}" for end in (".json", "_scores.json", "_choices.csv")}

    set_key(light, "removal.count", 100)
    done = run(light, "dvc", "repro", "--single-item", "removal", PREFECT_API_URL=server.url, PREFECT_HOME=str(tmp_path / "home"))
    assert done.returncode != 0 and "Traceback" not in done.stderr and "removal.count" in done.stderr
    assert server.last_run("palimpsest-stage")["state_name"] == "Failed"


def removal_project(root: Path) -> Path:
    """A project in which the real stage `removal` can run, alone."""
    make_toy(root / "light")
    shutil.copy(REPOSITORY / "dvc.yaml", root / "light/dvc.yaml")
    write_removal_inputs(root / "light/data")
    return root / "light"


def test_a_named_server_that_is_down_costs_a_warning(tmp_path: Path) -> None:
    light = removal_project(tmp_path)
    nowhere = "http://127.0.0.1:9/api"
    done = run(light, "dvc", "repro", "--single-item", "removal", PREFECT_API_URL=nowhere)
    assert done.returncode == 0 and "removal: done in" in done.stdout
    assert f"Warning: the Prefect server at {nowhere} (PREFECT_API_URL) does not answer" in done.stdout


def test_no_server_is_said_and_none_is_started(tmp_path: Path) -> None:
    root = make_toy(tmp_path / "alone")
    done = run(root, "pipeline", "run", "tokens")
    assert done.returncode == 0 and "No Prefect server is running" in done.stdout and "3 ran in" in done.stdout
    assert not (root / ".prefect").exists()
    done = run(root, "pipeline", "serve")
    assert done.returncode == 1 and "start one: python -m pipeline ui" in done.stderr


def test_a_server_that_dies_half_way_costs_a_warning(tmp_path: Path, start_server: Starter) -> None:
    root = make_toy(tmp_path / "project")
    process, url = start_server(root)
    command = [sys.executable, "-m", "pipeline", "run", "statistics", "redundancy"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    flow = subprocess.Popen(
        command, cwd=root, env={**environment, "TOY_SECONDS": "1.5"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert flow.stdout is not None
    said = []
    for line in flow.stdout:
        said.append(line)
        if "Running stage 'tokens'" in line:
            break
    kill_children(process.pid)
    start = time.monotonic()
    output, errors = flow.communicate(timeout=240)
    assert not is_alive(url, 1)
    assert flow.returncode == 0, errors
    assert f"Warning: the Prefect server at {url} no longer answers" in output and errors == ""
    assert "6 ran in" in output
    assert set(reproduce(["statistics", "redundancy"], root=root, say=said.append).values()) == {"unchanged"}
    assert time.monotonic() - start < 200  # the client by itself would try to reach it for a minute per stage


def kill_children(parent: int) -> None:
    """kill -9 the server under `pipeline ui`, and what it has started."""
    import psutil

    for child in psutil.Process(parent).children(recursive=True):
        child.kill()


def test_a_taken_port_is_said(project: Path, server: Server) -> None:
    port = server.url.split(":")[2].split("/")[0]
    done = run(project, "pipeline", "ui", "--port", port)
    assert done.returncode == 1 and f"port {port} on 127.0.0.1 is taken" in done.stderr


def test_the_ui_calls_the_port_it_is_served_from(server: Server) -> None:
    with urllib.request.urlopen(f"{server.url.removesuffix('/api')}/ui-settings") as answer:
        assert json.load(answer)["api_url"] == server.url


def test_dvc_failing_by_itself_is_said_in_its_own_words(project: Path) -> None:
    with pytest.raises(StageFailed, match="Stage 'nosuch' not found"):
        reproduce(["nosuch"], root=project, say=lambda line: None)
