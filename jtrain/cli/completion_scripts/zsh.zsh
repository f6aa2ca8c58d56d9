#compdef jtrain
# zsh: completion of jtrain
_jtrain() {
    local line="${(j: :)words[1,CURRENT-1]} $PREFIX"
    local -a found=("${(@f)$(jtrain completion --line "$line" 2>/dev/null)}")
    if [[ -z ${found[1]} ]]; then
        _files
        return
    fi
    compadd -S '' -- ${(M)found:#*[=./]}
    compadd -- ${found:#*[=./]}
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _jtrain "$@"
else
    (( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
    compdef _jtrain jtrain
fi
