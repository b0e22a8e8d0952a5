# Sourced by scripts that unpack Debian packages: an apt with package lists of its own, so that those of the machine stay as they are.
# Knows nothing of what is fetched. No root is needed.

# The machine's mirror of Debian, or the public one.
debian_mirror() {
    local found
    found=$(grep -rhoE 'https?://[^ ]*/debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | grep -v '/archive/' | head -1 | tr -d ' ' || true)
    echo "${found:-https://deb.debian.org/debian}"
}

# private_apt FOLDER deb|deb-src "SUITE COMPONENT..." [OPTION...]: sets the array apt, with its lists fetched.
private_apt() {
    local folder=$1 kind=$2 suite=$3
    shift 3
    mkdir -p "$folder"/lists/partial "$folder"/cache/archives/partial
    echo "$kind [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(debian_mirror) $suite" >"$folder/sources.list"
    : >"$folder/status"
    apt=(apt-get -qq -o Dir::Etc::sourcelist="$folder/sources.list" -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$folder/lists"
         -o Dir::Cache="$folder/cache" -o Dir::State::status="$folder/status" "$@")
    [ "$(id -u)" != 0 ] || apt+=(-o APT::Sandbox::User=root)
    "${apt[@]}" update
}
