#!/bin/sh
# Installs what the tests of the Slurm engine drive: Slurm's daemons and commands, munge, a database for its accounts, and
# an SSH server to be a login node. The tests start their own daemons.
set -eu
missing=""
command -v slurmctld >/dev/null 2>&1 && command -v slurmd >/dev/null 2>&1 || missing="$missing slurm-wlm"
command -v munged >/dev/null 2>&1 || missing="$missing munge"
[ -x /usr/sbin/sshd ] || missing="$missing openssh-server"
command -v ssh >/dev/null 2>&1 || missing="$missing openssh-client"
command -v ip >/dev/null 2>&1 || missing="$missing iproute2"
command -v slurmdbd >/dev/null 2>&1 || missing="$missing slurmdbd"
command -v mariadbd >/dev/null 2>&1 || missing="$missing mariadb-server-core"
command -v my_print_defaults >/dev/null 2>&1 || missing="$missing mariadb-client-core"
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "The tests of Slurm need:$missing. As root: apt-get install --no-install-recommends$missing" >&2
  exit 0 # they skip themselves, and say why
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing >/dev/null
