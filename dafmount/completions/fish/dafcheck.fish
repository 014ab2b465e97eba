# Completion of dafcheck for fish.

complete -c dafcheck -l quick -d 'Structure only'
complete -c dafcheck -s j -l jobs -x -d Threads
complete -c dafcheck -l json -d 'Print one JSON object'
complete -c dafcheck -s q -l quiet -d 'Findings only'
complete -c dafcheck -s h -l help -d 'Show a summary of the options'
complete -c dafcheck -l version -d 'Show the version'
