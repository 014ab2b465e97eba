# Completion of dafmount for bash. Where nothing is said here, bash completes names of files.

_dafmount() {
  # bash splits words at = and :, so what was typed since the last blank is taken from the line.
  local line=${COMP_LINE:0:COMP_POINT}
  local typed=${line##*[[:space:]]} earlier=${line%[[:space:]]*}
  local current=${COMP_WORDS[COMP_CWORD]} flag=${earlier##*[[:space:]]}
  COMPREPLY=()
  if [[ $flag == -o ]]; then
    _dafmount_words "$typed" "$current"
  elif [[ $typed == -o* ]]; then
    _dafmount_words "${typed#-o}" "$current"
  elif [[ $flag == -u || $flag == --unmount || $flag == --status ]]; then
    _dafmount_mountpoints "$current"
  elif [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '-f --foreground -o -u --unmount -l --list --status --json -v
      --verbose --log-file -h --help --version' -- "$current")
  fi
}

_dafmount_mountpoints() {
  local mountpoint kind
  compopt -o filenames
  while read -r _ mountpoint kind _; do
    printf -v mountpoint %b "$mountpoint"
    if [[ $kind == fuse.dafmount && $mountpoint == "$1"* ]]; then
      COMPREPLY+=("$mountpoint")
    fi
  done </proc/self/mounts
}

# _dafmount_words TYPED CURRENT: the words of -o; TYPED is there, CURRENT is what bash replaces.
_dafmount_words() {
  local word=${1##*,} values=
  case $word in
    layout=*) values='1.0 1.1' ;;
    verify=*) values='off auto all' ;;
    *=*) ;;
    *)
      compopt -o nospace
      mapfile -t COMPREPLY < <(compgen -P "${2%"$word"}" -W 'cache= spool= spool-size= layout= shards verify= timeout=
        refresh= decoders= readahead= nonempty uid= gid= umask= fmask= dmask= fsname= header-file= header= user=
        password-file= cacert= retries= connections= cache-dir= cache-dir-size= allow_other allow_root auto_unmount default_permissions max_read=
        ro noauto user _netdev comment=' -- "$word")
      return
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$values" -- "${word#*=}")
}

complete -o bashdefault -o default -F _dafmount dafmount
