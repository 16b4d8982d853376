#!/usr/bin/env bash
# Run one recording on the target branch and on this one, and compare the two: a change that is said to be none.
# usage: same.sh TARGET COMMAND REPORT   ({dump} in COMMAND is the folder that it records into)
set -euo pipefail
target=$1 command=$2 report=$3
work=$(mktemp -d)
trap 'git worktree remove --force "$work/tree" >/dev/null 2>&1 || true; rm -rf "$work"' EXIT
git worktree add --quiet --detach "$work/tree" "$target"
(cd "$work/tree" && bash -euo pipefail -c "${command//\{dump\}/$work/target}")
bash -euo pipefail -c "${command//\{dump\}/$work/change}"
regress compare "$work/target" "$work/change" --report "$report"
