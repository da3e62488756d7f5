#!/bin/sh
# Install Chromium, which the tests of pages drive, where that can be done: root, on Debian. The tests
# themselves say where it is missing.
for program in chromium chromium-browser google-chrome; do
  command -v $program >/dev/null && exit 0
done
[ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || exit 0
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
