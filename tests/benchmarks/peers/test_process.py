"""scripts/benchmarks/peers/process.py: peers in processes of their own, frozen between turns, and their failures."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.waiting import PATIENCE_S, until

from benchmarks.peers.process import NNUNET, NNUNET_DATA, TORCHIO_DATA, PeerProcess


def test_a_frozen_peer_and_its_worker_do_nothing_between_turns(tmp_path):
    """The worker counts in a file; the peer answers as soon as the count has changed."""
    count = tmp_path / "count"
    worker = (
        f"import itertools, time\nfor n in itertools.count(): open({str(count)!r}, "
        "'w').write(str(n)); time.sleep(0.001)"
    )
    code = f"""import pathlib, subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", {worker!r}])
count = pathlib.Path({str(count)!r})
count.touch()
print('{{"ready": true, "worker": ' + str(worker.pid) + '}}', flush=True)
for line in sys.stdin:
    if line.strip() == "quit":
        break
    before = count.read_text()
    while count.read_text() in ("", before):
        pass
    print('{{"seconds": 1, "asked": "' + line.strip() + '"}}', flush=True)
"""
    with PeerProcess(sys.executable, ["-c", code], PATIENCE_S, frozen=True) as peer:
        group = peer._process.pid
        for request in ("run 3", "run 4"):
            until(lambda: {state(group), state(peer.about["worker"])} == {"T"})
            assert peer.ask(request)["asked"] == request
        until(lambda: {state(group), state(peer.about["worker"])} == {"T"})
    until(lambda: not alive(group))  # the worker, too


def state(process):
    """One letter, T where it is stopped."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("script", [NNUNET_DATA, TORCHIO_DATA])
def test_data_scripts_import_neither_medconv_nor_torch_and_say_what_to_install(script, tmp_path):
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1])"
    code += "; assert not {'medconv', 'torch'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, *script, str(Path(script[0]).parent)], check=True, timeout=PATIENCE_S
    )
    if script is TORCHIO_DATA and find_spec("torchio"):
        return  # nothing to install
    sizes = ["--raw", "r", "--scratch", str(tmp_path), "--patch", "8", "8", "8", "--spacing", "1", "1", "1"]
    with (
        pytest.raises(ValueError) as error,
        PeerProcess(sys.executable, [*script, "--mode", "loader", *sizes], PATIENCE_S),
    ):
        pass
    message = str(error.value)
    assert sys.executable in message and "pip install" in message and "Traceback" not in message


def test_an_environment_without_nnunet_is_told_what_to_install():
    with pytest.raises(ValueError) as error, PeerProcess(sys.executable, NNUNET, limit_s=PATIENCE_S):
        pass
    message = str(error.value)
    assert (
        sys.executable in message and "pip install nnunetv2==2.8.1" in message and "Traceback" not in message
    )


def test_the_nnunet_script_imports_neither_medconv_nor_torch():
    # the folder of the script is on the path, as Python does for scripts
    code = "import runpy, sys; sys.path.insert(0, sys.argv[2]); runpy.run_path(sys.argv[1])"
    code += "; assert not {'medconv', 'torch'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code, *NNUNET, str(Path(NNUNET[0]).parent)], check=True, timeout=PATIENCE_S
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import sys; print('no luck', file=sys.stderr); sys.exit(3)",
            "ended with code 3; it printed last: no luck",
        ),
        ("print('hello')", "answered 'hello' where a JSON object with `ready` was needed"),
        ("print('{}')", "answered '{}' where"),
    ],
)
def test_a_failed_peer_is_named_with_its_output(code, message):
    with (
        pytest.raises(ValueError, match=re.escape(sys.executable) + "(?s:.*)" + message),
        PeerProcess(sys.executable, ["-c", code], PATIENCE_S),
    ):
        pass


def test_a_silent_peer_times_out():
    with (
        pytest.raises(ValueError, match=r"gave no answer within 0\.5 s; it printed nothing"),
        PeerProcess(sys.executable, ["-c", "import signal; signal.pause()"], 0.5),
    ):
        pass


def test_a_peer_that_fails_in_a_step_is_an_error_with_its_reason():
    code = "print('{\"ready\": true}', flush=True); input(); raise MemoryError('full')"
    with (
        PeerProcess(sys.executable, ["-c", code], PATIENCE_S) as peer,
        pytest.raises(ValueError, match="(?s)code 1.*MemoryError: full"),
    ):
        peer.step()


def test_a_missing_python_is_an_error(tmp_path):
    with (
        pytest.raises(ValueError, match="needed a python executable, got .*nowhere"),
        PeerProcess(tmp_path / "nowhere", NNUNET),
    ):
        pass
