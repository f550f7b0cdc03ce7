"""Every promise of an engine, kept by a real Slurm."""

import os

import pytest

from backend_contract import BackendContract
from phalanx.jobs.backends.slurm.backend import SlurmBackend
from slurm_cluster import SlurmCluster


class TestContract(BackendContract):
    timeout_s = 90.0

    @pytest.fixture
    def engine(self, rig: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmBackend:
        return SlurmBackend(rig.run, tmp_path_factory.mktemp("slurm"), os.environ)
