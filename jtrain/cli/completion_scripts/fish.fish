# fish: completion of jtrain
function __jtrain_complete
    set -l found (jtrain completion --line (commandline --cut-at-cursor --current-process | string collect) 2>/dev/null)
    if test -n "$found"
        printf '%s\n' $found
    else
        __fish_complete_path (commandline --current-token)
    end
end
complete --command jtrain --no-files --arguments '(__jtrain_complete)'
