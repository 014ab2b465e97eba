# Completion of dafinfo for bash. Where nothing is said here, bash completes names of files.

_dafinfo() {
  local current=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=()
  if [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '--json -h --help --version' -- "$current")
  fi
}

complete -o bashdefault -o default -F _dafinfo dafinfo
