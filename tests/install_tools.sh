#!/bin/sh
# Installs what the tests drive from outside Python: a browser, docker-compose (to check the file), PostgreSQL, ip and
# ss (hosts of one machine, and what their kernels count), bubblewrap, which keeps jobs apart, jemalloc, in which ranks
# have their tensors, nginx, which stands before the web, systemd-analyze, and Prometheus.
set -eu
missing=""
command -v chromium-headless-shell >/dev/null 2>&1 || missing="$missing chromium-headless-shell"
command -v docker-compose >/dev/null 2>&1 || missing="$missing docker-compose"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
command -v ss >/dev/null 2>&1 || missing="$missing iproute2"
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
ldconfig -p 2>/dev/null | grep -q libjemalloc || /sbin/ldconfig -p | grep -q libjemalloc || missing="$missing libjemalloc2"
command -v nginx >/dev/null 2>&1 || missing="$missing nginx-light"
command -v systemd-analyze >/dev/null 2>&1 || missing="$missing systemd"
command -v promtool >/dev/null 2>&1 || programs=yes
[ -n "$missing${programs:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "The tests need:$missing ${programs:+prometheus}. As root: apt-get install --no-install-recommends$missing" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
[ -z "$missing" ] || apt-get install -y -qq --no-install-recommends $missing >/dev/null
# Its package starts it, and it is nobody's to serve here.
case "$missing" in *nginx*) service nginx stop >/dev/null 2>&1 || true; systemctl disable nginx >/dev/null 2>&1 || true ;; esac
# Its two programs alone: the package would start a server of its own.
[ -z "${programs:-}" ] || (
  cd "$(mktemp -d)"
  apt-get download -qq prometheus >/dev/null
  dpkg-deb --fsys-tarfile prometheus_*.deb | tar x --strip-components=3 -C /usr/local/bin ./usr/bin/prometheus ./usr/bin/promtool
)
