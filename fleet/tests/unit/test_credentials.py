"""Credentials of services: from a private file or the environment, never shown."""

from pathlib import Path

import pytest

from phalanx.errors import UsageError
from phalanx_fleet.telemetry.credentials import Credentials, find_credentials

VARIABLES = {"PHALANX_MQTT_USER": "reader", "PHALANX_MQTT_PASSWORD": "from-environment"}


def write_private(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_file_comes_before_the_environment(tmp_path: Path) -> None:
    file = write_private(tmp_path / "netrc", "machine bus login operator password from-file\n")
    assert find_credentials("MQTT", "bus", file, VARIABLES) == Credentials("operator", "from-file")
    assert find_credentials("MQTT", "other", file, VARIABLES) == Credentials("reader", "from-environment")
    assert find_credentials("REDFISH", "other", file, VARIABLES) is None


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = write_private(tmp_path / "netrc", "machine bus login operator password from-file\n", 0o640)
    with pytest.raises(UsageError, match="run: chmod 600"):
        find_credentials("MQTT", "bus", file, {})


def test_a_file_that_is_wrong_or_missing_is_an_error_without_its_words(tmp_path: Path) -> None:
    file = write_private(tmp_path / "netrc", "machine bus login operator swordfish\n")
    with pytest.raises(UsageError, match="line 2: expected") as caught:
        find_credentials("MQTT", "bus", file, {})
    assert "swordfish" not in str(caught.value)
    with pytest.raises(UsageError, match="No such file"):
        find_credentials("MQTT", "bus", tmp_path / "none", {})


def test_a_password_is_not_shown() -> None:
    assert "swordfish" not in repr(Credentials("root", "swordfish"))
