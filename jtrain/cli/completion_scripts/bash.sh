# bash: completion of jtrain
_jtrain() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\n'
    local word=${line##*[[:space:]]}
    COMPREPLY=($(jtrain completion --line "$line" 2>/dev/null))
    # bash splits a word at these, and puts what is found after the last of them
    [[ $word == *[=:]* ]] && COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}")
    [[ ${COMPREPLY[0]} == *[=./] ]] && compopt -o nospace
}
complete -o default -F _jtrain jtrain
