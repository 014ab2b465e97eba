# Completion of dafcheck for bash. Where nothing is said here, bash completes names of files.

_dafcheck() {
  local current=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=()
  if [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '--quick -j --jobs --json -q --quiet -h --help --version' -- "$current")
  fi
}

complete -o bashdefault -o default -F _dafcheck dafcheck
