#!/bin/bash
# Job gpt-python: srun starts this once on each node, with the number of the attempt.
trap : HUP INT QUIT USR1 USR2 ALRM TERM # they reach every process; the command decides, and its code is to be told

# shellcheck disable=SC2016 # names are meant as they stand
folder=/home/me/state/slurm/gpt-python-0123abcd start='/shared/my work'
export PHALANX_NODE_RANK=$SLURM_PROCID

finish() {
  # by this shell alone: a signal to the step may come just now, and would end any program that it starts
  printf '%s\n' "$1" >"$folder/code.$2.$SLURMD_NODENAME" || exit "$1"
  # to srun this is no failure: it would kill the other nodes while they save
  if [[ $1 == 75 ]]; then exit 0; fi
  exit "$1"
}

if ! cd -- "$start"; then
  echo "$SLURMD_NODENAME does not see the job's folder; is it on a file system that all nodes share?" >&2
  finish 77 "$1"
fi
# the words stand as they were given
# shellcheck disable=all
(
. "$folder/secrets.sh"
export NCCL_DEBUG=WARN
export GREETING='a '"'"'b'"'"' $c'
exec -- phalanx train recipe.yaml 'note=it'"'"'s $HOME'
)
finish $? "$1"
