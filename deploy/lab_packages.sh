#!/bin/sh
# Install what the lab needs of the system, where that can be done: root, on Debian. The lab itself says
# what is missing.
for program in debootstrap systemd-nspawn promtool; do
  command -v $program >/dev/null || missing=yes
done
[ -z "$missing" ] && exit 0
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap systemd-container prometheus \
  openssh-client iproute2 nftables >/dev/null
