"""The agent of a node that does not lead ends its workers in bounded time, whatever its nursery does."""

import io

import pytest

from phalanx.jobs import member as module
from phalanx.jobs.member import Member
from phalanx.jobs.nodes import Here
from phalanx.run.channel import pair, receive, send
from phalanx.run.membership import Membership
from phalanx.run.pulse import Pulses


@pytest.mark.parametrize("answers", [True, False], ids=["it answers", "it is held still"])
def test_workers_are_ended_or_given_up_in_time(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ENDING", 5.0 if answers else 0.1)
    (control, nursery), (events, workers), out = pair(), pair(), io.StringIO()
    pulses = Pulses()
    if answers:
        send(nursery, {"kind": "exited", "rank": 2, "code": -9}, {"kind": "exited", "rank": 3, "code": -9})
    try:
        with Member(Membership(1, 2, ("127.0.0.1", 1)), b"", out) as member:
            member._alive = {2, 3}
            assert member._end_workers(Here(control, events, pulses)) is answers
        assert receive(nursery) == [{"kind": "signal", "number": 9}]
        assert ("did not end them within 0.1 s" in out.getvalue()) is not answers
        assert member._alive == set()
    finally:
        for each in (control, nursery, events, workers):
            each.close()
        pulses.close()
