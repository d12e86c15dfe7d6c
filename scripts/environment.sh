# Sourced by scripts/demo and scripts/test: makes .venv once and installs qinfer into it.
# usage: environment EXTRA   (EXTRA is "" or "[test]")

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Error: qinfer needs Python 3.11 or newer; found $(${PYTHON:-python3} --version 2>&1)." >&2
  echo "Hint: install it, or name it: PYTHON=/path/to/python3.12 $0" >&2
  return 1
}

environment() {
  local extra=$1 stamp wanted python
  stamp=.venv/installed-${extra:-base}
  if [ -d .venv ] && ! .venv/bin/python -c '' 2>/dev/null; then
    rm -rf .venv # made by a Python that is gone, or moved
  fi
  if [ ! -d .venv ]; then
    python=$(find_python) || return 1
    if ! "$python" -m venv .venv; then
      rm -rf .venv
      echo "Error: $python cannot make a virtual environment." >&2
      echo "Hint: on Debian and Ubuntu, apt install python3-venv." >&2
      return 1
    fi
  fi
  wanted=$(cat pyproject.toml scripts/constraints.txt qinfer/ops/cpu/*.[ch] | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing into .venv (once) ..." >&2
    local pip=".venv/bin/python -m pip --disable-pip-version-check install -q --no-compile -c scripts/constraints.txt"
    # torch first and by itself, so that nothing pulls in a larger build of it
    $pip torch==2.13.0 && $pip -e ".$extra" || return 1
    echo "$wanted" >"$stamp"
  fi
}
