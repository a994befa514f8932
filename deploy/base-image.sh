#!/bin/sh
# Builds a base image instead of pulling one: Debian with Python 3.11, by debootstrap.  Needs root and Docker.
#   deploy/base-image.sh [TAG]
set -eu
tag=${1:-shardproof-base}
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
trap 'exit 130' INT TERM
debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" \
    > "$root.log" 2>&1 || { tail -n 5 "$root.log" >&2; rm -f "$root.log"; exit 1; }
rm -f "$root.log"
# Package caches, documentation and locales are half of the size.
rm -rf "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/* \
    "$root"/usr/share/doc/* "$root"/usr/share/locale/* "$root"/usr/share/man/*
tar -C "$root" -c . | docker import - "$tag" > /dev/null
echo "$tag"
