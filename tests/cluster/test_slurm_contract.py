"""Every promise of an engine, kept by a real Slurm."""

import itertools
import os

import pytest

from backend_contract import BackendContract
from phalanx.jobs.backends.slurm.backend import QUEUE_MAX_AGE_S, SlurmBackend
from slurm_cluster import SlurmCluster


class TestContract(BackendContract):
    timeout_s = 90.0

    @pytest.fixture
    def engine(self, rig: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmBackend:
        folder = tmp_path_factory.mktemp("slurm")
        return SlurmBackend(rig.run, folder, os.environ, itertools.count(step=QUEUE_MAX_AGE_S).__next__)
