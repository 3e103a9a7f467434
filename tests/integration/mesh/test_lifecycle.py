"""`phasemesh up` as its user meets it: the banner's commands, the client commands, the ways in and out."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from phasemesh.cli.supervisor import EXIT_CONFIG
from tests.mesh import Mesh, running_mesh

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CLI = [sys.executable, "-m", "phasemesh.cli.main"]


def shell(command: str) -> str:
    done = subprocess.run(["bash", "-ec", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def cli(*arguments: str, status: int = 0) -> str:
    done = subprocess.run([*CLI, *arguments], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def banner_commands(mesh: Mesh) -> list[str]:
    """Commands of the banner: indented lines from a program's name to where the indentation ends."""
    lines = mesh.output.split("phasemesh is ready", 1)[1].splitlines()
    commands: list[str] = []
    for line in lines:
        if re.match(r"  (curl|\S*grpcurl) ", line):
            commands.append(line.strip())
        elif line.startswith("    ") and commands:
            commands[-1] += "\n" + line
    return commands


def descendants(pid: int) -> set[int]:
    """`pid` and every process below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = {pid}, [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found.update(children)
        todo += children
    return found


def running(pids: set[int]) -> set[int]:
    """Those of `pids` that still run; zombies don't."""
    alive = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.add(pid)
    return alive


def gone(mesh: Mesh, pids: set[int]) -> None:
    mesh.wait_until(lambda: not running(pids), 40, "every process to be gone")


def left_behind(mesh: Mesh) -> set[str]:
    """What a mesh that is gone left in its runtime folder, besides its empty locks."""
    names = {path.name for path in mesh.runtime_dir.iterdir()}
    return {name for name in names if not name.endswith(".lock")}


def test_the_banner_s_commands_work_as_they_stand(mesh: Mesh) -> None:
    embedding, grpc, rerank, create, store, find = banner_commands(mesh)
    vector = json.loads(shell(embedding))["data"][0]["embedding"]
    over_grpc = json.loads(shell(grpc))
    assert len(vector) == over_grpc["dense"]["shape"][1] == 384
    assert over_grpc["dense"]["values"] == pytest.approx(vector, abs=1e-6)
    phases = [phase["phase"] for phase in over_grpc["timings"]["phases"]]
    assert phases == ["encode.tokenize", "encode.queue", "encode.forward", "encode.pool"]
    best = json.loads(shell(rerank))["results"][0]
    assert best["index"] == 1
    spec = json.loads(shell(create))["collection"]["spec"]
    assert spec["model"] == "colbert"  # the late-interaction model, not the first with token vectors
    assert json.loads(shell(store))["stored"] == 1
    assert [hit["id"] for hit in json.loads(shell(find))["hits"]] == ["a"]


def test_grpcurl_lists_describes_and_checks_health(mesh: Mesh) -> None:
    tool = shlex.split(banner_commands(mesh)[1])[0]
    call = f"{tool} -plaintext {mesh.grpc}"
    assert "phasemesh.v1.EncoderService" in shell(f"{call} list").split()
    assert "rpc Embed" in shell(f"{call} describe phasemesh.v1.EncoderService")
    assert "repeated .phasemesh.v1.Input inputs" in shell(f"{call} describe phasemesh.v1.EmbedRequest")
    for service in ("", "phasemesh.v1.EncoderService"):
        request = shlex.quote(json.dumps({"service": service}))
        reply = shell(f"{tool} -plaintext -d {request} {mesh.grpc} grpc.health.v1.Health/Check")
        assert json.loads(reply) == {"status": "SERVING"}


def test_rpcs_of_later_releases_say_so(mesh: Mesh) -> None:
    tool = shlex.split(banner_commands(mesh)[1])[0]
    for method, said in (
        ("EncoderService/Classify", "later release"),
        ("RetrievalService/Search", "RetrievalService"),
        ("ScorerService/LeafSearch", "ScorerService"),
    ):
        proto = f"-import-path {Path('protos').resolve()} -proto phasemesh/v1/scorer.proto -proto phasemesh/v1/encoder.proto -proto phasemesh/v1/retrieval.proto"
        command = f"{tool} -plaintext {proto} {mesh.grpc} phasemesh.v1.{method}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=30, check=False
        )
        assert "Unimplemented" in done.stderr, done.stderr
        assert said in done.stderr, done.stderr


def test_client_commands(mesh: Mesh, tmp_path: Path) -> None:
    where = ("--runtime-dir", str(mesh.runtime_dir))
    assert "minilm" in cli("models", *where)
    rows = cli("embed", "one", "two", "-m", "minilm", "--json", *where).splitlines()
    assert [len(json.loads(row)["embedding"]) for row in rows[:2]] == [384, 384]
    file = tmp_path / "documents.txt"
    file.write_text("Bread needs flour.\nA mesh joins nodes.\n")
    out = cli("rerank", "What joins nodes?", "-f", str(file), "-m", "minilm", "--json", *where)
    ranked = json.loads(out.splitlines()[0])
    assert [row["index"] for row in ranked] == [1, 0]
    assert "MODEL_NOT_FOUND (model)" in cli("embed", "x", "-m", "nobody", *where, status=1)
    assert "phasemesh up" in cli("models", "--runtime-dir", str(tmp_path), status=EXIT_CONFIG)


def test_demo(mesh: Mesh) -> None:
    out = cli("demo", "-m", "minilm", "--runtime-dir", str(mesh.runtime_dir))
    assert "260 vectors of 384" in out
    # By cosine of embeddings, and by late interaction over a collection.
    by_cosine, by_tokens = (int(found) for found in re.findall(r"(\d+) of 24 questions", out))
    assert by_cosine >= 22
    assert 0 <= by_tokens <= 24  # of the late-interaction model, which is a tiny one here and knows nothing
    assert "260 documents" in out
    for phase in ("encode.forward", "gateway.rpc", "search.plan", "score.maxsim", "search.merge"):
        assert phase in out


def test_index_and_search_commands(mesh: Mesh, tmp_path: Path) -> None:
    where = ("--runtime-dir", str(mesh.runtime_dir), "--collection", "papers")
    folder = tmp_path / "papers"
    folder.mkdir()
    moon = folder / "moon.md"
    moon.write_text("The Moon orbits the Earth once a month.\n\nTides follow the Moon.\n")
    (folder / "bread.jsonl").write_text('{"id": "b1", "text": "Bread needs flour, water and yeast."}\n')
    out = cli("index", str(folder), "-m", "minilm", *where)
    assert "created papers" in out
    assert "3 documents" in out
    table = cli("search", "What does the Moon go around?", *where)
    assert "moon.md#1" in table
    assert "score.maxsim" in table
    assert "exact" in table

    def found(*arguments: str) -> list[str]:
        rows = cli("search", "the Moon and the tides", "--json", *arguments, *where).splitlines()
        return [json.loads(row)["id"] for row in rows if row.startswith("{")]

    assert set(found()) == {"moon.md#1", "moon.md#2", "b1"}
    assert found("--filter", "path=bread.jsonl") == ["b1"]
    assert found("--filter", '{"not": {"equals": {"field": "path", "value": "moon.md"}}}') == ["b1"]
    # Again: nothing is doubled, and what a file no longer holds is gone.
    moon.write_text("The Moon orbits the Earth once a month.\n")
    assert "1 removed" in cli("index", str(folder), *where)
    assert set(found()) == {"moon.md#1", "b1"}
    # A file that can't be read costs the others nothing.
    (folder / "noise.txt").write_bytes(bytes(range(128, 256)))
    (folder / "more.txt").write_text("Venus turns slowly.")
    out = cli("index", str(folder), *where, status=1)
    assert "noise.txt: is not UTF-8" in out
    assert "more.txt#1" in found()
    assert "COLLECTION_NOT_FOUND" in cli(
        "search", "x", "--runtime-dir", str(mesh.runtime_dir), "--collection", "nobody", status=1
    )
    assert "does it run there?" in cli("search", "x", "--target", "127.0.0.1:1", *where, status=1)


def test_ctrl_c_drains_and_leaves_nothing() -> None:
    with running_mesh() as mesh:
        pids = descendants(mesh.process.pid)
        assert len(pids) > 5  # the roles, Ray's processes, the worker
        with httpx.Client(base_url=mesh.rest) as http:
            body = {"model": "all-MiniLM-L6-v2", "input": [f"{n} " + "word " * 200 for n in range(96)]}
            import threading

            statuses: list[int] = []
            asking = threading.Thread(
                target=lambda: statuses.append(http.post("/v1/embeddings", json=body, timeout=60).status_code)
            )
            asking.start()
            mesh.wait_until(
                lambda: (
                    "queue_items" in mesh.admin("encoder", "/metrics")[1]
                    and not re.search(
                        r"phasemesh_inflight_requests 0\.0", mesh.admin("encoder", "/metrics")[1]
                    )
                ),
                20,
                "the request to be in flight",
            )
            assert mesh.stop(signal.SIGINT) == 0
            asking.join(10)
        assert statuses == [200]  # what was in flight was answered
        gone(mesh, pids)
        assert left_behind(mesh) == set()
        assert "stopped" in mesh.output


def test_ctrl_c_under_a_launcher_exits_0(tmp_path: Path) -> None:
    """As under `make run`: the launcher shares the terminal, and outlives Ctrl-C to report our status."""
    roles = ("gateway", "encoder", "retrieval", "scorer")
    ports = " ".join(f"--set {role}.{name}=0" for role in roles for name in ("port", "admin_port"))
    folders = ["--runtime-dir", str(tmp_path), "--data-dir", str(tmp_path / "data")]
    # Ray's sockets need a short path, which pytest's folders don't have; without Ray it doesn't matter.
    up = shlex.join([*CLI, "up", "--no-ray", *folders]) + f" {ports}"
    launcher = f"sh -c {shlex.quote(up + '; echo the status is $?')}"
    process = subprocess.Popen(
        ["script", "-qefc", launcher, "/dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "Ctrl-C drains and stops" in line:
            process.stdin.write("\x03")
            process.stdin.flush()
        if "the status is" in line:
            break
    process.stdin.close()
    process.stdout.close()
    process.wait(20)
    assert "the status is 0" in seen[-1], "".join(seen)
    assert any("draining" in line for line in seen)


def test_a_killed_supervisor_takes_its_roles_along() -> None:
    with running_mesh("--no-ray") as mesh:
        assert (mesh.runtime_dir / "settings.yaml").stat().st_mode & 0o777 == 0o600
        pids = descendants(mesh.process.pid)
        os.kill(mesh.process.pid, signal.SIGKILL)
        mesh.process.wait(10)
        gone(mesh, pids)
        assert "settings.yaml" not in left_behind(mesh)  # keys may stand in it


def test_a_killed_encoder_s_leavings_are_swept() -> None:
    with running_mesh() as mesh:
        before = mesh.report("encoder")
        assert list(mesh.runtime_dir.glob("ray-*"))
        os.kill(before.pid, signal.SIGKILL)
        mesh.wait_until(lambda: mesh.report("encoder").pid != before.pid, 60, "the encoder to be restarted")
        assert mesh.stop(signal.SIGTERM) == 0
        assert left_behind(mesh) == set()


def test_one_request_to_stop_that_arrives_twice_drains() -> None:
    """As `timeout` sends it: to the process and to its group."""
    with running_mesh("--no-ray") as mesh:
        for _ in range(2):
            mesh.process.send_signal(signal.SIGTERM)
            mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(30) == 0
        assert "encoder stopped" in mesh.output


def test_an_impatient_second_ctrl_c_kills_and_says_so() -> None:
    with running_mesh("--no-ray", "--set", "rpc.drain_delay_s=30") as mesh:
        pids = descendants(mesh.process.pid)
        mesh.process.send_signal(signal.SIGINT)
        time.sleep(1.5)  # the second one has to come later than a wrapper's
        mesh.process.send_signal(signal.SIGINT)
        assert mesh.process.wait(20) == 130
        gone(mesh, pids)
        assert left_behind(mesh) == set()


def test_a_dead_collector_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    tracing = ("--set", "tracing.exporter=otlp", "--set", f"tracing.endpoint=http://127.0.0.1:{port}")
    with running_mesh("--no-ray", *tracing) as mesh:
        reply = httpx.post(
            f"{mesh.rest}/v1/embeddings", json={"model": "all-MiniLM-L6-v2", "input": "x"}, timeout=30
        )
        assert reply.status_code == 200
        began = time.monotonic()
        assert mesh.stop(signal.SIGTERM) == 0
        assert time.monotonic() - began < 15  # two roles in turn, each with its own bound of 3 s


def test_two_of_a_role_in_one_folder_are_refused(mesh: Mesh) -> None:
    out = cli(
        "gateway",
        "--runtime-dir",
        str(mesh.runtime_dir),
        "--port",
        "0",
        "--admin-port",
        "0",
        status=EXIT_CONFIG,
    )
    assert "in use by another gateway" in out


def test_keys_open_every_door() -> None:
    keys = "[{name: mesh, key: mesh-key-mesh-key, role: mesh}, {name: team, key: team-key-team-key}]"
    with running_mesh("--no-ray", "--set", f"access.keys={keys}") as mesh:
        assert "mesh-key" not in mesh.output
        where = ("--runtime-dir", str(mesh.runtime_dir))
        assert "needs a key" in cli("embed", "x", *where, status=1)
        assert "dimensions" in cli("embed", "x", "--key", "team-key-team-key", *where)
        body = {"model": "all-MiniLM-L6-v2", "input": "x"}
        url = f"{mesh.rest}/v1/embeddings"
        assert httpx.post(url, json=body).status_code == 401
        wrong = {"Authorization": "Bearer wrong-key-wrong"}
        assert httpx.post(url, json=body, headers=wrong).status_code == 401
        right = {"Authorization": "Bearer team-key-team-key"}
        assert httpx.post(url, json=body, headers=right, timeout=30).status_code == 200
        out = cli("demo", "--key", "team-key-team-key", *where)
        assert "24 questions" in out


def test_two_at_once_is_refused_by_name(mesh: Mesh) -> None:
    out = cli("up", "--runtime-dir", str(mesh.runtime_dir), status=EXIT_CONFIG)
    assert "in use by another `phasemesh up`" in out


def test_a_taken_port_is_named_before_anything_loads(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        folders = ("--runtime-dir", str(tmp_path), "--data-dir", str(tmp_path / "data"))
        out = cli("up", *folders, "--port", str(port), status=EXIT_CONFIG)
    assert f"gateway.port: 127.0.0.1:{port}" in out
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-m", "x=/nowhere/at/all"], "/nowhere/at/all"),
        (["--replicas", "64"], "64 replica(s) need 1 CPU"),
        (["--device", "cuda"], "GPU"),
    ],
)
def test_a_wrong_start_ends_with_the_reason(arguments: list[str], said: str) -> None:
    with running_mesh(*arguments, wait=False) as mesh:
        assert mesh.process.wait(60) != 0
        mesh.wait_until(lambda: "error:" in mesh.output, 5, "an error")
        assert said in mesh.output
        assert "Traceback" not in mesh.output


def test_help_has_examples() -> None:
    assert "make" not in cli("--help")
    for command in (
        "up",
        "encoder",
        "gateway",
        "retrieval",
        "scorer",
        "embed",
        "rerank",
        "index",
        "search",
        "config",
    ):
        assert "Example" in cli(command, "--help")
