"""How workers that an outside launcher started learn what to train: the leading one tells the others over the store."""

import json
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from phalanx.errors import ExitCode, PhalanxError
from phalanx.train.place import Place, open_store

PATIENCE = timedelta(hours=12)
"""Preparing data on the leading worker may take long."""


def announce(place: Place, payload: dict[str, Any]) -> None:
    """Tell all workers of this attempt what to train, or with `error` and `code` why there is nothing."""
    if place.world > 1:
        open_store(place).set(_key(place), json.dumps(payload))


def await_announcement(place: Place) -> dict[str, Any]:
    """What the leading worker told. PhalanxError when it failed, and where no agent looks after this worker also when
    it is gone."""
    try:
        store = open_store(place)
        store.wait([_key(place)], PATIENCE)
        payload: dict[str, Any] = json.loads(store.get(_key(place)))
    except dist.DistError as lost:
        if "PHALANX_EVENTS" in os.environ:
            raise
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        gone = PhalanxError(f"the leading worker was lost before it said what to train (at {where}); start again")
        gone.code = ExitCode.UNFINISHED
        raise gone from lost
    if "error" in payload:
        error = PhalanxError(f"the leading worker could not make the run ready: {payload['error']}")
        error.code = ExitCode(payload["code"])
        raise error
    return payload


def _key(place: Place) -> str:
    # The meeting tells runs apart that share an agent's store and have the same attempt.
    return f"phalanx/attempt{place.attempt}/{os.environ.get('PHALANX_MEETING', 0)}/run"
