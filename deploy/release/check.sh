#!/usr/bin/env bash
# Is this commit fit to be released? Builds wheel, source archive, SBOM and, where there is a Docker daemon, the image into
# dist/, and says everything that is missing at once. Status 1 if anything is. `check.sh paper` looks at version, changelog
# and checkout only, and builds nothing. docs/releasing.md says when it is run.
set -euo pipefail
cd "${RELEASE_ROOT:-"$(dirname "$0")/../.."}"

python=${PYTHON:-python3}
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' gateway/__init__.py)
missing=()

main() {
  paper
  if [ "${1:-}" != paper ]; then
    step "wheel and source archive" packages
    step "wheel in an empty environment" installed
    step "SBOM" sbom
    image
  fi
  if [ ${#missing[@]} -gt 0 ]; then
    printf 'Not fit to be released as %s:\n' "$version" >&2
    printf '  - %s\n' "${missing[@]}" >&2
    exit 1
  fi
  echo "Fit to be released: slotgate $version"
}

paper() {
  [[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+((a|b|rc)[0-9]+)?$ ]] || missing+=("gateway/__init__.py: \`$version\` is no version like 1.2.3")
  grep -qE "^## \[?${version//./\\.}\]? - 20[0-9]{2}-[0-9]{2}-[0-9]{2}" CHANGELOG.md ||
    missing+=("CHANGELOG.md: no section \`## $version - YYYY-MM-DD\`")
  if sed -n '/^## \[*Unreleased/,/^## [^U]/p' CHANGELOG.md | grep -q '^- '; then
    missing+=("CHANGELOG.md: entries under Unreleased; move them to $version")
  fi
  grep -q "newTag: \"$version\"" deploy/kubernetes/base/kustomization.yaml ||
    missing+=("deploy/kubernetes/base/kustomization.yaml: newTag is not $version")
  [ -z "$(git status --porcelain)" ] || missing+=("the checkout has changes that are not committed")
  local tagged
  if tagged=$(git rev-parse -q --verify "refs/tags/v$version^{commit}") && [ "$tagged" != "$(git rev-parse HEAD)" ]; then
    missing+=("tag v$version exists, on another commit: raise __version__")
  fi
}

# A step that fails is noted and does not hide what comes after it. In a shell of its own, because bash forgets `-e` inside
# a function that is tested.
step() {
  local status
  echo "== $1"
  set +e
  (set -e; "$2")
  status=$?
  set -e
  [ $status = 0 ] || missing+=("$1: see above")
}

packages() {
  rm -rf dist
  make -s dist PYTHON="$python"
  ls dist/slotgate-"$version"-py3-none-any.whl dist/slotgate-"$version".tar.gz
}

installed() {
  rm -rf build/release
  "$python" -m venv build/release
  build/release/bin/python -m pip install -q --disable-pip-version-check -c requirements-dev.lock dist/slotgate-"$version"-py3-none-any.whl
  build/release/bin/python -m pip check
  [ "$(build/release/bin/slotgate --version)" = "slotgate, version $version" ]
  build/release/bin/slotgate check --offline config/minimal.yaml
}

# Of what a user gets: the environment with the wheel and nothing else. The tool that looks stands in another one.
sbom() {
  [ -x build/sbom/bin/cyclonedx-py ] || "$python" -m venv build/sbom
  build/sbom/bin/python -m pip install -q --disable-pip-version-check "cyclonedx-bom>=7"
  build/release/bin/python -m pip uninstall -q -y pip setuptools
  build/sbom/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml \
    --output-file dist/slotgate-"$version".cdx.json build/release/bin/python
  grep -q '"name": "uvicorn"' dist/slotgate-"$version".cdx.json
  (cd dist && sha256sum -- slotgate-* > SHA256SUMS && cat SHA256SUMS)
}

image() {
  if ! command -v docker >/dev/null || ! docker info >/dev/null 2>&1; then
    echo "== image: left out, no Docker daemon here" >&2
    return
  fi
  step "image" built_image
}

built_image() {
  docker build --pull -t "slotgate:$version" --build-arg VERSION="$version" --build-arg REVISION="$(git rev-parse HEAD)" .
  docker run --rm --read-only --cap-drop ALL "slotgate:$version" --version
  [ "$(docker run --rm --entrypoint id "slotgate:$version" -u)" = 10001 ]
  ! docker run --rm --entrypoint sh "slotgate:$version" -c 'command -v pip || command -v gcc'
}

main "$@"
