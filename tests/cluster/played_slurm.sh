#!/bin/bash
# Slurm's commands as train.sbatch calls them, played: each is a link to this file, and does by its name what
# the files in $PLAY say. test_batch_script.py says what these are.
name=${0##*/}
# In one write, as many of them run at the same time.
printf '%s\n' "$name $(tr '\n' ' ' <<<"$*")" >>"$PLAY/calls"
own() { # value of the first option of this name
    local word
    for word in "${words[@]}"; do
        if [[ $word == "--$1="* ]]; then
            echo "${word#*=}"
            return
        fi
    done
}
words=("$@")

case $name in
sleep)
    exec /bin/sleep 0.02
    ;;
scontrol)
    case "$*" in
    "show hostnames "*) tr ',' '\n' <<<"$3" ;;
    "--oneliner show job "*) tr '\n' ' ' <"$PLAY/job" ;;
    "requeue "*)
        if [[ -e $PLAY/no_requeue ]]; then
            echo "scontrol: error: Requested operation is presently disabled" >&2
            exit 1
        fi
        ;;
    "update "*)
        # What a job that is being ended is asked, Slurm ignores without a word.
        if [[ -e $PLAY/deaf ]]; then
            rm "$PLAY/deaf"
        else
            sed -i "s/^NumTasks=.*/$(grep -o 'NumTasks=[0-9]*' <<<"$*")/" "$PLAY/job"
        fi
        ;;
    *) exit 64 ;;
    esac
    ;;
sinfo)
    own nodes | tr ',' '\n' | grep -xf "$PLAY/idle"
    ;;
sbatch)
    number=$(find "$PLAY" -name 'small_*' | wc -l)
    cat >"$PLAY/small_$number"
    if [[ -e $PLAY/no_sbatch ]]; then
        echo "sbatch: error: invalid partition specified: $(own partition)" >&2
        exit 1
    fi
    echo "$((100 + number));cluster"
    ;;
scancel)
    touch "$PLAY/asked"
    ;;
srun)
    if [[ ${words[-1]} == true ]]; then # does the node answer?
        ! own nodelist | grep -qxf "$PLAY/lost"
        exit
    fi
    if [[ ${words[-2]} == -c ]]; then # a guard
        if [[ -e $PLAY/guards ]]; then
            exec "${words[@]: -3}"
        fi
        exit 0
    fi
    exec 9>"$PLAY/lock"
    flock 9
    number=$(($(<"$PLAY/started") + 1))
    echo "$number" >"$PLAY/started"
    exec 9>&-
    SCRIPT=$PPID exec bash -c "$(sed -n "${number}p" "$PLAY/starts")"
    ;;
esac
