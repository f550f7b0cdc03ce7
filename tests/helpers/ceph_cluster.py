"""A real S3 server on this machine, for tests and for play: Ceph's RADOS gateway on a small Ceph cluster.

    with ceph_cluster(directory, osds=3) as ceph:          # about 4 s; needs Debian's radosgw, ceph-mon, ceph-osd
        ceph.make_bucket("runs")
        store = S3Store("runs", config=ceph.config, client_options={"allow_http": True})
        subprocess.run([...], env={**os.environ, **ceph.environment})
        ceph.kill_osd(0)                                   # a dead disk: two copies of three are left
        ceph.kill_gateway()                                # connection refused until start_gateway()

One monitor, one to three OSDs and one gateway listen on 127.0.0.1, each on a free port, so that several clusters can
run at the same time; root is not needed. With three OSDs each object has three copies, of which two must be writable;
with two OSDs two and one. The OSDs write to sparse files below `directory`, which survive `kill_osd`. There is no
authentication between the daemons, only that of S3. There is no manager daemon: `ceph -c ceph.conf osd tree` answers,
`ceph df` does not.

At the end of the block, or when this process is killed, the daemons are killed and their files removed.
"""

import base64
import contextlib
import email.utils
import hashlib
import hmac
import json
import os
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from server_processes import find_free_port

PROGRAMS = ("ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin", "setsid")
PACKAGES = "ceph-mon ceph-osd radosgw"
START_TIMEOUT_S = 90.0
ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
OSD_BYTES = 16 * 1024**3
"""Size of an OSD's sparse file: what it can store, not what it takes."""

CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{monitor_port}]
public_addr = 127.0.0.1
ms_bind_msgr1 = false
# without authentication there is no encryption either, which radosgw would ask for
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
admin_socket = $name.asok
log_file = $name.log
log_to_stderr = false
err_to_stderr = true
crash_dir = .
keyring = keyring
ms_async_op_threads = 2
# a client that waits for an OSD looks this often, and asks the monitor after this time: else 5 s and 10 s
objecter_tick_interval = 0.25
objecter_timeout = 0.5
osd_pool_default_size = {size}
osd_pool_default_min_size = {min_size}
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
[mon]
mon_data = mon
mon_cluster_log_to_file = false
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
# a disk that is nearly full must not stop a test
mon_data_avail_crit = 0
# each pool of the gateway takes some proposals: 0.05 s instead of 1 s for each
paxos_propose_interval = 0.05
paxos_min_wait = 0.01
# an OSD is down as soon as one other cannot connect to it, and its copies stay where they are
mon_osd_min_down_reporters = 1
mon_osd_adjust_heartbeat_grace = false
mon_osd_down_out_interval = 0
[osd]
osd_data = osd$id
osd_objectstore = bluestore
bluestore_block_size = {osd_bytes}
bluestore_fsck_on_mkfs = false
# closing the file waits for this interval, eight times during the start
bdev_aio_poll_ms = 10
osd_memory_target = 939524096
bluestore_cache_autotune = false
bluestore_cache_size = 33554432
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
osd_heartbeat_interval = 1
osd_heartbeat_grace = 4
osd_recovery_sleep = 0
[client.rgw]
rgw_data = rgw
# without tcp_nodelay most answers wait 40 ms for an acknowledgement
rgw_frontends = beast endpoint=127.0.0.1:{gateway_port} tcp_nodelay=1
rgw_thread_pool_size = 32
rgw_override_bucket_index_max_shards = 1
rgw_enable_lc_threads = false
rgw_run_sync_thread = false
# a change of the cache waits until a killed gateway, which would be notified too, times out
rgw_cache_enabled = false
"""

REAPER = """\
read -r _
exec setsid --fork sh -c 'kill -s KILL -- "-$1"; sleep 0.5; rm -rf "$2"' sh "$$" "$1"
"""
"""Waits for the end of its input, which comes when this process ends, however it ends; then it kills its process group,
the daemons, from outside of it, and removes their directory."""


def find_obstacle() -> str | None:
    """Why there can be no cluster on this machine, in words; None if nothing is in the way."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"an S3 server to test on: not installed: {', '.join(missing)} (Debian: apt-get install {PACKAGES})"
    return None


CEPH_MISSING = find_obstacle()


@dataclass
class CephCluster:
    """A cluster that runs, in `directory`: its `ceph.conf` and the daemons' logs lie there."""

    directory: Path
    osds: int
    gateway_port: int
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    _daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _reaper: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def config(self) -> dict[str, str]:
        """The options of obstore's S3Store."""
        return {
            "endpoint": self.endpoint,
            "access_key_id": self.access_key,
            "secret_access_key": self.secret_key,
            "region": "us-east-1",
        }

    @property
    def environment(self) -> dict[str, str]:
        """What obstore and the AWS tools read from the environment. The gateway takes any region."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket; it is no error if it is there. The request has the signature of S3's first version, which
        needs a few lines only."""
        date = email.utils.formatdate(usegmt=True)
        text = f"PUT\n\n\n{date}\n/{name}"
        signature = base64.b64encode(hmac.digest(self.secret_key.encode(), text.encode(), hashlib.sha1)).decode()
        headers = {"Date": date, "Authorization": f"AWS {self.access_key}:{signature}"}
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT", headers=headers)
        urllib.request.urlopen(request, timeout=60).close()

    def kill_osd(self, number: int) -> None:
        """Kill an OSD at once; its file stays."""
        self._kill(f"osd.{number}")

    def start_osd(self, number: int) -> None:
        """Start an OSD that was killed, and wait until the others know that it is up."""
        self._start_osd(number)
        self._wait_for_osd(number)

    def kill_gateway(self) -> None:
        """Kill the gateway at once: connections break, new ones are refused."""
        self._kill("client.rgw")

    def start_gateway(self) -> None:
        """Start a gateway that was killed, at the same endpoint, and wait until it answers."""
        self._start_gateway()
        self._wait_for_gateway()

    def remove_key(self) -> None:
        """Have the store refuse the access key from now on, as one that has expired."""
        self._run("radosgw-admin", "--conf=ceph.conf", "key", "rm", "--uid=test", f"--access-key={self.access_key}")

    def restore_key(self) -> None:
        """Have the store know the access key again."""
        key = [f"--access-key={self.access_key}", f"--secret={self.secret_key}"]
        self._run("radosgw-admin", "--conf=ceph.conf", "key", "create", "--uid=test", *key)

    def _open(self) -> None:
        self._reaper = subprocess.Popen(
            ["sh", "-c", REAPER, "sh", str(self.directory)], stdin=subprocess.PIPE, cwd="/", process_group=0
        )
        monitor_port, fsid = find_free_port(), str(uuid.uuid4())
        (self.directory / "ceph.conf").write_text(
            CONFIGURATION.format(
                fsid=fsid,
                monitor_port=monitor_port,
                gateway_port=self.gateway_port,
                size=self.osds,
                min_size=max(1, self.osds - 1),
                osd_bytes=OSD_BYTES,
            )
        )
        (self.directory / "keyring").touch()
        self._run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v2:127.0.0.1:{monitor_port}]", "monmap")
        formatting = []
        for number in range(self.osds):  # while the monitor starts
            (self.directory / f"osd{number}").mkdir()
            words = ["ceph-osd", "--conf=ceph.conf", f"--id={number}", "--mkfs", "--no-mon-config"]
            formatting.append(self._spawn(f"mkfs.{number}", [*words, f"--osd-uuid={uuid.uuid4()}"]))
        self._run("ceph-mon", "--conf=ceph.conf", "--id=a", "--mkfs", "--monmap=monmap")
        self._spawn("mon.a", ["ceph-mon", "--conf=ceph.conf", "--id=a", "-f"])
        user = ["radosgw-admin", "--conf=ceph.conf", "user", "create", "--uid=test", "--display-name=test"]
        user += [f"--access-key={self.access_key}", f"--secret={self.secret_key}"]
        # both wait until there is an OSD, and one of them makes the zone
        creating_user = self._spawn("user", user)
        self._start_gateway()
        for number, process in enumerate(formatting):
            self._wait_for_end(f"mkfs.{number}", process)
            self._start_osd(number)
        self._wait_for_end("user", creating_user)
        for number in range(self.osds):
            self._wait_for_osd(number)
        self._wait_for_gateway()

    def _close(self) -> None:
        for daemon in self._daemons.values():
            daemon.kill()
        for daemon in self._daemons.values():
            daemon.wait()
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()

    def _start_osd(self, number: int) -> None:
        # its socket would be there although it does not listen yet
        (self.directory / f"osd.{number}.asok").unlink(missing_ok=True)
        self._spawn(f"osd.{number}", ["ceph-osd", "--conf=ceph.conf", f"--id={number}", "-f"])

    def _start_gateway(self) -> None:
        self._spawn("client.rgw", ["radosgw", "--conf=ceph.conf", "--name=client.rgw", "-f"])

    def _spawn(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        assert name not in self._daemons, f"{name} runs already"
        assert self._reaper is not None
        with open(self.directory / f"{name}.out", "ab") as output:
            process = subprocess.Popen(
                words,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=self._reaper.pid,  # which Ctrl-C does not reach
            )
        self._daemons[name] = process
        return process

    def _run(self, *words: str) -> None:
        done = subprocess.run(words, cwd=self.directory, capture_output=True, text=True)
        assert done.returncode == 0, f"{shlex.join(words)}: {done.stderr}{done.stdout}"

    def _kill(self, name: str) -> None:
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()

    def _wait_for_end(self, name: str, process: subprocess.Popen[bytes]) -> None:
        self._wait_for(name, lambda: process.poll() is not None)
        assert process.returncode == 0, self._last_words(name)
        del self._daemons[name]

    def _wait_for_osd(self, number: int) -> None:
        name = f"osd.{number}"
        self._wait_for(name, lambda: bool(self._ask(name, "status")["state"] == "active"))

    def _wait_for_gateway(self) -> None:
        def answers() -> bool:
            urllib.request.urlopen(self.endpoint, timeout=5).close()
            return True

        self._wait_for("client.rgw", answers)

    def _wait_for(self, name: str, condition: Callable[[], bool]) -> None:
        """Look until a condition holds, which may fail with OSError until then; a daemon that ended is an error."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError):
                if condition():
                    return
            code = self._daemons[name].poll()
            assert code in (None, 0), f"{name} ended with {code}:\n{self._last_words(name)}"
            assert time.monotonic() < deadline, f"{name}: not in {START_TIMEOUT_S:g} s:\n{self._last_words(name)}"
            time.sleep(0.02)

    def _last_words(self, name: str) -> str:
        files = [self.directory / f"{name}.{ending}" for ending in ("out", "log")]
        lines = [
            line for file in files if file.exists() for line in file.read_text(errors="replace").splitlines()[-15:]
        ]
        return "\n".join(lines)

    def _ask(self, daemon: str, command: str) -> dict[str, Any]:
        """A command to a daemon's admin socket."""
        here = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(10)
                connection.connect(f"/proc/self/fd/{here}/{daemon}.asok")  # a path may have 107 bytes only
                connection.sendall(json.dumps({"prefix": command}).encode() + b"\0")
                with connection.makefile("rb") as answer:
                    text = answer.read()[4:]  # after its length
            try:
                fields: dict[str, Any] = json.loads(text)
            except json.JSONDecodeError:  # a daemon that starts does not know all commands yet
                raise OSError(f"{daemon}: {command}: {text.decode(errors='replace')}") from None
            return fields
        finally:
            os.close(here)


@contextlib.contextmanager
def ceph_cluster(directory: Path, osds: int = 1) -> Iterator[CephCluster]:
    """A cluster whose files lie in a new directory below `directory`; one to three OSDs."""
    assert 1 <= osds <= 3
    obstacle = find_obstacle()
    if obstacle is not None:
        raise RuntimeError(obstacle)
    # a killed daemon's last write may still come while the files are removed
    with tempfile.TemporaryDirectory(prefix="ceph-", dir=directory, ignore_cleanup_errors=True) as below:
        cluster = CephCluster(Path(below).resolve(), osds, find_free_port())
        try:
            cluster._open()
            yield cluster
        finally:
            cluster._close()
