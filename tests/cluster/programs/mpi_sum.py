"""Sums over all processes with MPI."""

from mpi4py import MPI

world = MPI.COMM_WORLD
total = world.allreduce(world.Get_rank() + 1)
print(f"sum {total} of {world.Get_size()}", flush=True)
