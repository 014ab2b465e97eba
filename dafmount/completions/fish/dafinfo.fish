# Completion of dafinfo for fish.

complete -c dafinfo -l json -d 'Print JSON instead of tables'
complete -c dafinfo -s h -l help -d 'Show a summary of the options'
complete -c dafinfo -l version -d 'Show the version'
