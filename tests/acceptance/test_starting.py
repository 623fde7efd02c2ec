"""Nodes that start: what is refused, with which words and status, and what comes up in spite of all."""

import json
import socket
import textwrap
from pathlib import Path

import pytest

from tests.acceptance.http_api import as_json
from tests.acceptance.node_set import STARVED_SECONDS, eventually, open_set, run_node

SEED = ("--roles", "proxy,manager,store")
ALL_IN_ONE = ("--devices", "cpu:0=4GiB")
LISTEN_FAILED = 3
UNUSABLE = 2


# --- bad options -------------------------------------------------------------------------------


def test_unknown_option() -> None:
    """A flag that does not exist ends the node with status 2, and is named."""
    ended = run_node("--lissten", "tcp://127.0.0.1:0")
    assert ended.returncode == UNUSABLE
    assert "--lissten" in ended.stderr


def test_option_of_an_address_to_join() -> None:
    """An address that no connection could ever be opened to ends the node, whoever is up there."""
    ended = run_node("--roles", "worker", "--join", "tcp://127.0.0.1:1?smh=off")
    assert ended.returncode == UNUSABLE
    assert "shm=auto|off|required|copy" in ended.stderr


@pytest.mark.parametrize("workflow", ["stages.nowhere:nothing", "stages.echo:shouted"])
def test_workflow_that_is_not_there(workflow: str) -> None:
    """A workflow that cannot be imported ends the node, and is named."""
    ended = run_node("--workflow", workflow)
    assert ended.returncode == UNUSABLE
    assert workflow.partition(":")[0] in ended.stderr
    assert "Traceback" not in ended.stderr


def test_workflow_module_that_exits(tmp_path: Path) -> None:
    """A module that calls ``sys.exit`` when it is imported is named; it does not end the node unseen."""
    (tmp_path / "leaver.py").write_text("import sys\n\nsys.exit(0)\n")
    ended = run_node("--workflow", "leaver:anything", cwd=tmp_path)
    assert ended.returncode == UNUSABLE
    assert "leaver" in ended.stderr
    assert "SystemExit" in ended.stderr


def test_listening_beyond_the_machine_needs_a_secret() -> None:
    """Without a secret a node refuses an address that others can reach, and says what to do."""
    ended = run_node("--listen", "tcp://0.0.0.0:0")
    assert ended.returncode == UNUSABLE
    assert "--secret-file" in ended.stderr
    assert "--insecure" in ended.stderr


def test_flag_wins_over_environment_over_file(tmp_path: Path) -> None:
    """A node takes its name from the flag, its log's form from the variable, the rest from the file."""
    file = tmp_path / "node.toml"
    file.write_text('name = "from-file"\nlog_json = false\nroles = ["manager"]\n')
    environment = {
        "ONEPIECE_CONFIG": str(file),
        "ONEPIECE_NAME": "from-environment",
        "ONEPIECE_LOG_JSON": "true",
    }
    with open_set(tmp_path / "set") as a_set:
        node = a_set.start("--name", "from-flag", environment=environment)
        assert node.node_id == "from-flag"
        assert node.wait_listening()["http"] is None, "only the role manager was asked for"
        assert json.loads(node.log().splitlines()[0])["event"]


# --- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--listen", "--http"])
def test_port_in_use(option: str, tmp_path: Path) -> None:
    """The node ends with status 3, names the port, and leaves nothing (fault 17)."""
    state = tmp_path / "state"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = f"tcp://127.0.0.1:{port}" if option == "--listen" else f"127.0.0.1:{port}"
        ready = tmp_path / "ready.json"
        ended = run_node(option, value, "--state-dir", str(state), "--ready-file", str(ready))
        assert ended.returncode == LISTEN_FAILED, ended.stderr
        assert str(port) in ended.stderr
        assert "in use" in ended.stderr
        assert "Traceback" not in ended.stderr
        assert not ready.exists()
    again = run_node("--state-dir", str(state), "--devices", "tpu:0")
    assert "in use" not in again.stderr, "the failed node left its lock behind"


def test_default_nodes_share_a_host(tmp_path: Path) -> None:
    """Three nodes with default flags come up side by side on one host (fault 121)."""
    with open_set(tmp_path / "set") as a_set:
        nodes = [a_set.start() for _ in range(3)]
        assert len({node.address for node in nodes}) == 3
        assert len({node.http for node in nodes}) == 3
        for node in nodes:
            assert a_set.api(node).client.get("/healthz").status_code == 200


STARTS_AT_ONCE = 50


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(12, marks=pytest.mark.timeout(600)),
        pytest.param(STARTS_AT_ONCE, marks=[pytest.mark.full, pytest.mark.timeout(3 * STARVED_SECONDS)]),
    ],
)
def test_concurrent_starts_have_addresses_of_their_own(tmp_path: Path, count: int) -> None:
    """Workers that start at once get each its own address and name, and all join (fault 123)."""
    with open_set(tmp_path / "set") as a_set:
        seed = a_set.start(*SEED, "--workers", f"{count}")
        seed.wait_listening()
        workers = [a_set.start_worker() for _ in range(count)]
        for worker in workers:
            worker.wait_listening(STARVED_SECONDS)
        assert len({worker.address for worker in workers}) == count
        ids = {worker.node_id for worker in workers}
        assert len(ids) == count
        eventually(lambda: ids < a_set.api().nodes().keys(), "all have joined", STARVED_SECONDS)


def test_two_processes_of_one_name(tmp_path: Path) -> None:
    """A second process under a name that is taken replaces the first, which stops and says why."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*SEED).wait_listening()
        first = a_set.start_worker("--name", "twin")
        eventually(lambda: "twin" in a_set.api().nodes(), "the first has joined")
        second = a_set.start_worker("--name", "twin")
        assert first.wait() == 1
        assert "had to stop" in first.log()
        assert "a node id of its own" in first.log()
        eventually(lambda: a_set.api().nodes()["twin"]["process_id"] == second.pid, "the second has the name")


# --- before it is ready ------------------------------------------------------------------------


def test_submit_immediately_after_start(tmp_path: Path) -> None:
    """A request before the stages are loaded is refused as not ready, at once; later ones work (fault 1)."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*SEED, "--workflow", "tests.acceptance.own_stages:slow_start")
        api = a_set.api()
        early = api.post("slow_start", {"text": "early"})
        assert early.status_code == 503
        assert early.json()["error"] in {"NotReady", "UnknownWorkflow"}
        a_set.start_worker()
        refusals = 0
        while (answer := api.post("slow_start", {"text": "ahoy"})).status_code != 202:
            assert answer.json()["error"] == "NotReady", answer.text
            assert "slow_to_load" in answer.json()["message"]
            refusals += 1
        assert refusals > 0
        assert api.result(answer.json()["uid"]) == "ahoy"


def test_everything_in_one_process(tmp_path: Path) -> None:
    """One node with all roles serves a workflow by itself (fault 111)."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*ALL_IN_ONE, "--workflow", "stages.echo:echo")
        a_set.wait_ready()
        assert a_set.api().run("echo", {"text": "ahoy"}) == "AHOY!"
        assert a_set.api().run("echo", {"text": "again"}) == "AGAIN!"


def test_stage_that_fits_nowhere(tmp_path: Path) -> None:
    """Readiness and submission name the stage, its need and what there is; others are served (fault 119)."""
    with open_set(tmp_path / "set") as a_set:
        workflows = ("--workflow", "tests.acceptance.own_stages:too_large", "--workflow", "stages.echo:echo")
        a_set.start(*ALL_IN_ONE, *workflows)
        api = a_set.api()
        eventually(lambda: api.post("echo", {"text": "x"}).status_code == 202, "the other workflow is served")
        readiness = api.readiness()
        assert not readiness["ready"]
        refused = api.post("too_large", {"text": "ahoy"})
        assert refused.status_code == 503
        for message in ("; ".join(readiness["waiting_for"]), refused.json()["message"]):
            assert "enormous" in message
            assert "needs 2.9 TiB" in message
            assert "4.0 GiB" in message
            assert "cpu:0" in message


def test_stage_that_cannot_be_loaded(tmp_path: Path) -> None:
    """Readiness and submission give the setup's own error."""
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*ALL_IN_ONE, "--workflow", "tests.acceptance.own_stages:never_ready")
        api = a_set.api()
        eventually(
            lambda: "the weights are not there" in "; ".join(api.readiness()["waiting_for"]), "the error"
        )
        refused = api.post("never_ready", {"text": "ahoy"})
        assert refused.status_code == 503
        assert "the weights are not there" in refused.json()["message"]


# --- who may join ------------------------------------------------------------------------------

CAPTAIN = """
    from onepiece import StageContext, stage, workflow

    @stage
    async def sail(ctx: StageContext[None], {parameters}) -> str:
        return "sailed"

    @workflow
    def voyage({parameters}) -> str:
        return sail({names})
"""


def write_version(directory: Path, parameters: str, names: str) -> Path:
    """A directory with a version of the module ``captain``."""
    directory.mkdir()
    text = textwrap.dedent(CAPTAIN).format(parameters=parameters, names=names)
    (directory / "captain.py").write_text(text)
    return directory


def test_two_versions_of_a_workflow(tmp_path: Path) -> None:
    """A worker with another version of the file is not used; the error has both schemas (fault 7)."""
    old = write_version(tmp_path / "old", "course: str", "course")
    new = write_version(tmp_path / "new", "course: str, knots: int", "course, knots")
    with open_set(tmp_path / "set") as a_set:
        seed = a_set.start(*SEED, "--workflow", "captain:voyage", cwd=new)
        seed.wait_listening()
        joining = ("--join", seed.address, *ALL_IN_ONE)
        outdated = a_set.start("--roles", "worker,proxy", *joining, cwd=old)
        api = a_set.api()

        def mismatch() -> str | None:
            text = "; ".join(api.readiness()["waiting_for"])
            return text if "knots" in text else None

        text = eventually(mismatch, "the mismatch is told")
        assert "course: str, knots: int" in text
        assert "(course: str)" in text
        refused = api.post("voyage", {"course": "north", "knots": 5})
        assert refused.status_code == 503
        assert "knots" in refused.json()["message"]
        refused = a_set.api(outdated).post("voyage", {"course": "north"})
        assert refused.status_code == 503
        assert "not the same here as at the manager" in refused.json()["message"]
        a_set.start("--roles", "worker", *joining, cwd=new)
        a_set.wait_ready()
        assert not a_set.api(outdated).readiness()["ready"]
        assert api.run("voyage", {"course": "north", "knots": 5}) == "sailed"


def write_secret(path: Path, text: str) -> str:
    """A secret file."""
    path.write_text(text)
    return str(path)


def test_wrong_secret(tmp_path: Path) -> None:
    """A worker with another secret does not join, and says that the secret is wrong."""
    right = write_secret(tmp_path / "right", "open sesame, open sesame")
    wrong = write_secret(tmp_path / "wrong", "open barley, open barley")
    with open_set(tmp_path / "set") as a_set:
        a_set.start(*SEED, "--secret-file", right, "--workflow", "stages.echo:echo").wait_listening()
        stranger = a_set.start_worker("--secret-file", wrong)
        eventually(lambda: "secret" in stranger.log(), "the stranger says why")
        friend = a_set.start_worker("--secret-file", right)
        a_set.wait_ready()
        assert a_set.api().nodes().keys() == {a_set.seed.node_id, friend.node_id}
        assert a_set.api().run("echo", {"text": "ahoy"}) == "AHOY!"


def test_secret_lets_nodes_listen_beyond_the_machine(tmp_path: Path) -> None:
    """With a secret nodes listen on every interface, under an address that works; or ``--insecure true``."""
    secret = write_secret(tmp_path / "secret", "open sesame, open sesame")
    with open_set(tmp_path / "set") as a_set:
        everywhere = ("--listen", "tcp://0.0.0.0:0", "--http", "0.0.0.0:0", "--secret-file", secret)
        seed = a_set.start(*SEED, *everywhere, "--workflow", "stages.synthetic:noop")
        a_set.start_worker(*everywhere)
        named = a_set.start_worker(*everywhere, "--advertise", "localhost")
        a_set.wait_ready()
        assert a_set.api().run("noop", {"payload": as_json(b"ahoy")}) == b"ahoy"
        assert "0.0.0.0" not in seed.address + seed.http, "nobody can send anything there"
        assert named.address.startswith("tcp://localhost:")
        a_set.start("--listen", "tcp://0.0.0.0:0", "--insecure", "true").wait_listening()
