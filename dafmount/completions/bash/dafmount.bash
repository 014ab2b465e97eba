# Completion of dafmount for bash; independent of the package bash-completion, which loads it on demand.

_dafmount() {
  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]}
  # bash splits words at = and :, so what was typed since the last blank is taken from the line.
  local line=${COMP_LINE:0:COMP_POINT}
  local typed=${line##*[[:space:]]} earlier=${line%[[:space:]]*}
  local flag=${earlier##*[[:space:]]}
  COMPREPLY=()

  if [[ $flag == -o || $typed == -o?* ]]; then
    _dafmount_words "${typed#-o}" "$current"
    return
  fi
  case $before in
    -u | --unmount)
      local mountpoint IFS=$'\n'
      mountpoint=$(while read -r _ where kind _; do
        [[ $kind == fuse.dafmount ]] && printf '%b\n' "$where"
      done </proc/self/mounts)
      compopt -o filenames
      COMPREPLY=($(compgen -W "${mountpoint//\'/\\\'}" -- "$current"))
      return
      ;;
    --log-file)
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -f -- "$current")
      return
      ;;
  esac
  if [[ $current == -* ]]; then
    mapfile -t COMPREPLY < <(compgen -W '-f --foreground -o -u --unmount -v --verbose --log-file -h --help --version' -- "$current")
    return
  fi
  compopt -o filenames
  mapfile -t COMPREPLY < <(compgen -f -- "$current")
}

# _dafmount_words TYPED CURRENT: the words of -o, of which TYPED are there and CURRENT is to be replaced.
_dafmount_words() {
  local word=${1##*,} current=$2 values=
  case $word in
    layout=*) values='1.0 1.1' ;;
    verify=*) values='off auto all' ;;
    spool=*)
      compopt -o filenames
      mapfile -t COMPREPLY < <(compgen -d -- "${word#*=}")
      return
      ;;
    *=*) return ;;
    *)
      compopt -o nospace
      mapfile -t COMPREPLY < <(compgen -P "${current%"$word"}" -W 'cache= spool= spool-size= layout= shards verify=
        timeout= nonempty uid= gid= umask= fsname= allow_other allow_root auto_unmount default_permissions max_read=
        ro nosuid nodev noauto user _netdev' -- "$word")
      return
      ;;
  esac
  mapfile -t COMPREPLY < <(compgen -W "$values" -- "${word#*=}")
}

complete -F _dafmount dafmount
