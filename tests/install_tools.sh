#!/bin/sh
# Installs programs that the tests start. With the argument `node`, installs only Node.js, which `make lint` needs.
# iproute2 emulates several hosts, bubblewrap isolates jobs, jemalloc is the allocator of ranks, and nginx is the proxy.
set -eu
missing=""
{ command -v node && command -v npm; } >/dev/null 2>&1 || missing=" nodejs npm"
if [ "${1:-}" != node ]; then
command -v chromium-headless-shell >/dev/null 2>&1 || missing="$missing chromium-headless-shell"
command -v docker-compose >/dev/null 2>&1 || missing="$missing docker-compose"
ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || missing="$missing postgresql"
command -v ss >/dev/null 2>&1 || missing="$missing iproute2"
command -v bwrap >/dev/null 2>&1 || missing="$missing bubblewrap"
ldconfig -p 2>/dev/null | grep -q libjemalloc || /sbin/ldconfig -p | grep -q libjemalloc || missing="$missing libjemalloc2"
command -v nginx >/dev/null 2>&1 || missing="$missing nginx-light"
command -v systemd-analyze >/dev/null 2>&1 || missing="$missing systemd"
command -v promtool >/dev/null 2>&1 || programs=yes
fi
[ -n "$missing${programs:-}" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
  echo "The tests need:$missing ${programs:+prometheus}. As root: apt-get install --no-install-recommends$missing" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
[ -z "$missing" ] || apt-get install -y -qq --no-install-recommends $missing >/dev/null
# The package starts a server, which the tests do not use.
case "$missing" in *nginx*) service nginx stop >/dev/null 2>&1 || true; systemctl disable nginx >/dev/null 2>&1 || true ;; esac
# Only two programs of the package, because the package would start a server.
[ -z "${programs:-}" ] || (
  cd "$(mktemp -d)"
  apt-get download -qq prometheus >/dev/null
  dpkg-deb --fsys-tarfile prometheus_*.deb | tar x --strip-components=3 -C /usr/local/bin ./usr/bin/prometheus ./usr/bin/promtool
)
