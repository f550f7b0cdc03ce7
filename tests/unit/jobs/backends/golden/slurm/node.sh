#!/bin/bash
# Job gpt-python: srun starts this once on each node, with the number of the attempt.
trap : HUP INT QUIT USR1 USR2 ALRM TERM # the command handles them, and this script records its exit code

# shellcheck disable=SC2016 # names are meant as they stand
folder=/home/me/state/slurm/gpt-python-0123abcd start='/shared/my work'
export PHALANX_NODE_RANK=$SLURM_PROCID

finish() {
  # only with builtins: a signal to the step at this moment would end any program that this shell starts
  printf '%s\n' "$1" >"$folder/code.$2.$SLURMD_NODENAME" || exit "$1"
  # report success to srun, which would otherwise kill the other nodes while they save
  if [[ $1 == 75 ]]; then exit 0; fi
  exit "$1"
}

if ! cd -- "$start"; then
  echo "$SLURMD_NODENAME does not see the job's folder; is it on a file system that all nodes share?" >&2
  finish 77 "$1"
fi
# the words are quoted already
# shellcheck disable=all
(
. "$folder/secrets.sh"
export NCCL_DEBUG=WARN
export GREETING='a '"'"'b'"'"' $c'
exec -- phalanx train recipe.yaml 'note=it'"'"'s $HOME'
)
finish $? "$1"
