package copilot

// This file is the child: finding the CLI, starting it over pipes of our own, and seeing to it that nothing of it is left.
//
// Its one idea: one goroutine per child owns it from launch to reaping: it starts the program, notices its end before the
// number is free for others, deals with what the child left behind, reaps, and publishes the outcome once.
// Everybody else sends signals under mu, which is refused after the reaping. What differs between systems is
// the type family; this file knows nothing of JSON-RPC.

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
	"unicode/utf8"
)

const (
	tailBytes      = 64 << 10               // of stderr, kept for errors
	queueBytes     = 256 << 10              // of stderr, waiting for Options.Stderr
	lateBytes      = 1 << 20                // read after the child's end from a pipe that somebody else holds open
	stdoutLinger   = 500 * time.Millisecond // how long stdout may outlive the child
	stderrLinger   = 200 * time.Millisecond // the same for stderr
	stderrBackstop = 2 * time.Second        // for reading the rest of it on a busy machine
	copyWait       = 500 * time.Millisecond // for Options.Stderr to take the rest
	killWait       = time.Second            // for the reaping, once killed and out of time
	familyWait     = 500 * time.Millisecond // for killed descendants to go
)

// ListenError reports that a CLI started with TCP announced no usable port. Output quotes the line at fault, or the
// beginning of what stdout held instead, at most 256 bytes.
type ListenError struct {
	Output string
}

// Error describes what went wrong.
func (e *ListenError) Error() string {
	return fmt.Sprintf("copilot: the CLI announced no usable port: %q", e.Output)
}

// command is one way of running the CLI, resolved from Options.
type command struct {
	path    string   // absolute
	args    []string // without the program's own name
	dir     string   // "" is the current directory
	env     []string
	stdio   bool
	stderr  io.Writer    // may be nil
	logger  *slog.Logger // may be nil
	secrets []string     // to be kept out of every text
}

// newCommand checks those of o's fields that concern the child, and finds the program. Over TCP, o has its
// ConnectionToken already. It starts nothing.
//
// The child gets o.Env, or the current environment, with the library's variables added last, so that they win.
// NODE_OPTIONS, NODE_DEBUG and the like are passed on like any other.
func newCommand(o *Options) (*command, error) {
	bad := func(format string, a ...any) (*command, error) {
		return nil, fmt.Errorf("%w: "+format, append([]any{ErrInvalidConfig}, a...)...)
	}
	switch {
	case o.Transport != Stdio && o.Transport != TCP:
		return bad("unknown Transport %d", o.Transport)
	case o.Port < 0 || o.Port > 65535:
		return bad("Port %d is not in 0..65535", o.Port)
	case o.Port != 0 && o.Transport != TCP:
		return bad("Port needs Transport TCP")
	case o.ConnectionToken != "" && o.Transport != TCP:
		return bad("ConnectionToken needs Transport TCP")
	case o.Mode != ModeCLI && o.Mode != ModeEmpty:
		return bad("unknown Mode %d", o.Mode)
	case o.SessionIdleTimeout < 0:
		return bad("negative SessionIdleTimeout %v", o.SessionIdleTimeout)
	case o.StopGrace < 0:
		return bad("negative StopGrace %v", o.StopGrace)
	}
	c := &command{stdio: o.Transport == Stdio, stderr: o.Stderr, logger: o.Logger}
	if o.Dir != "" {
		dir, err := filepath.Abs(o.Dir)
		if err == nil {
			_, err = os.Stat(dir + string(filepath.Separator) + ".") // needs the right to enter it, too
		}
		if err != nil {
			return bad("directory %s: %w", quote(o.Dir), err)
		}
		c.dir = dir
	}

	c.env = (&exec.Cmd{Env: o.Env, Dir: c.dir}).Environ()
	home := ""
	if o.BaseDir != "" {
		var err error
		if home, err = filepath.Abs(o.BaseDir); err != nil {
			return bad("BaseDir %s: %w", quote(o.BaseDir), err)
		}
	}
	for _, key := range []string{"COPILOT_GITHUB_TOKEN", "GH_TOKEN", "GITHUB_TOKEN", "COPILOT_SDK_AUTH_TOKEN", "COPILOT_CONNECTION_TOKEN"} {
		c.secrets = append(c.secrets, getenv(c.env, key))
	}
	c.secrets = append(c.secrets, o.GitHubToken, o.ConnectionToken)
	c.secrets = slices.DeleteFunc(c.secrets, func(s string) bool { return s == "" })

	program, before, err := findCLI(o.CLI, c.env)
	if err != nil {
		return nil, err
	}
	c.path = program
	c.setenv("COPILOT_SDK_AUTH_TOKEN", o.GitHubToken)
	c.setenv("COPILOT_CONNECTION_TOKEN", o.ConnectionToken)
	c.setenv("COPILOT_HOME", home)
	if o.Mode == ModeEmpty {
		c.setenv("COPILOT_DISABLE_KEYTAR", "1")
	}
	if t := o.Telemetry; t != nil {
		c.setenv("COPILOT_OTEL_ENABLED", "true")
		c.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", t.Endpoint)
		c.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", t.Protocol)
		c.setenv("COPILOT_OTEL_FILE_EXPORTER_PATH", t.FilePath)
		c.setenv("COPILOT_OTEL_EXPORTER_TYPE", t.Exporter)
		c.setenv("COPILOT_OTEL_SOURCE_NAME", t.SourceName)
		if t.CaptureContent != nil {
			c.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", strconv.FormatBool(*t.CaptureContent))
		}
	}

	args := append(before, o.PrefixArgs...)
	args = append(args, "--headless", "--no-auto-update")
	if o.LogLevel != "" {
		args = append(args, "--log-level", o.LogLevel)
	}
	if c.stdio {
		args = append(args, "--stdio")
	} else if o.Port != 0 {
		args = append(args, "--port", strconv.Itoa(o.Port))
	}
	if o.GitHubToken != "" {
		args = append(args, "--auth-token-env", "COPILOT_SDK_AUTH_TOKEN")
	}
	if o.UseLoggedInUser == nil && o.GitHubToken != "" || o.UseLoggedInUser != nil && !*o.UseLoggedInUser {
		args = append(args, "--no-auto-login")
	}
	if d := o.SessionIdleTimeout; d > 0 {
		s := int64(d / time.Second)
		if d%time.Second != 0 {
			s++
		}
		args = append(args, "--session-idle-timeout", strconv.FormatInt(s, 10))
	}
	if o.RemoteSessions {
		args = append(args, "--remote")
	}
	c.args = append(args, o.Args...)

	for _, s := range slices.Concat(o.Env, c.env, c.args) {
		if strings.ContainsRune(s, 0) {
			return bad("a NUL byte in an argument or environment variable")
		}
	}
	if isBatch(c.path) && slices.ContainsFunc(append([]string{c.path}, c.args...), unsafeInBatch) {
		return bad("batch file %s with arguments that its interpreter would read in its own way; name the program behind it", quote(c.path))
	}
	return c, nil
}

// setenv adds a variable unless its value is empty.
func (c *command) setenv(key, value string) {
	if value != "" {
		c.env = append(c.env, key+"="+value) // os/exec lets the last one win
	}
}

// getenv is the value that the last entry for key gives it.
func getenv(env []string, key string) string {
	for _, kv := range slices.Backward(env) {
		if k, v, ok := strings.Cut(kv, "="); ok && (k == key || runtime.GOOS == "windows" && strings.EqualFold(k, key)) {
			return v
		}
	}
	return ""
}

// String gives program and arguments for error texts, with secrets masked.
func (c *command) String() string {
	var b strings.Builder
	for i, s := range append([]string{c.path}, c.args...) {
		if i > 0 {
			b.WriteByte(' ')
		}
		if s == "" || strings.ContainsFunc(s, func(r rune) bool { return r <= ' ' || r == '"' || r == '\'' || r == utf8.RuneError }) {
			s = strconv.Quote(s)
		}
		b.WriteString(s)
	}
	return mask(b.String(), c.secrets)
}

// longest is the length of the longest secret.
func longest(secrets []string) (n int) {
	for _, s := range secrets {
		n = max(n, len(s))
	}
	return n
}

// ---- lookup ----

// lookup finds programs on a system that is described by its fields, so that every system's rules can be tested on
// any.
type lookup struct {
	goos    string
	path    string                             // PATH
	pathExt string                             // PATHEXT
	file    func(name string, exec bool) error // nil: name is a file (that may be executed)
	head    func(name string) (line string)    // the beginning of a file; "" if it cannot be read
	abs     func(name string) (string, error)  // as filepath.Abs
}

// findCLI finds what cli stands for under the child's environment: the program to run and its first arguments.
func findCLI(cli string, env []string) (string, []string, error) {
	l := &lookup{
		goos:    runtime.GOOS,
		path:    getenv(env, "PATH"),
		pathExt: getenv(env, "PATHEXT"),
		abs:     filepath.Abs,
		file: func(name string, exec bool) error {
			info, err := os.Stat(name)
			switch {
			case err != nil:
				return err
			case info.IsDir():
				return &fs.PathError{Op: "run", Path: name, Err: errors.New("is a directory")}
			case exec && runtime.GOOS != "windows" && info.Mode()&0o111 == 0:
				return &fs.PathError{Op: "run", Path: name, Err: fs.ErrPermission}
			}
			return nil
		},
		head: func(name string) string {
			f, err := os.Open(name)
			if err != nil {
				return ""
			}
			defer f.Close()
			b := make([]byte, maxQuote)
			n, _ := io.ReadFull(f, b)
			return string(b[:n])
		},
	}
	from := "Options.CLI"
	if cli == "" {
		cli, from = getenv(env, "COPILOT_CLI_PATH"), "COPILOT_CLI_PATH"
	}
	if cli == "" {
		cli, from = "copilot", "Options.CLI and COPILOT_CLI_PATH are empty"
	}
	program, args, err := l.resolve(cli)
	if err != nil {
		return "", nil, fmt.Errorf("%w: %w (%s)", ErrCLINotFound, err, from)
	}
	return program, args, nil
}

// resolve turns a program's name or path into a path that can be executed and the arguments that come first. A script
// for node is run by node; so is the one behind the shims that npm writes on Windows, which no program can start
// without a shell that reads the arguments in its own way.
func (l *lookup) resolve(cli string) (program string, args []string, err error) {
	if l.isPath(cli) || isScript(cli) {
		if cli, err = l.abs(cli); err == nil {
			program, err = l.exists(cli)
		}
	} else {
		program, err = l.search(cli)
	}
	switch {
	case err != nil:
		return "", nil, err
	case isScript(program):
		return l.node(program)
	case l.goos == "windows" && (isBatch(program) || hasSuffixFold(program, ".ps1")):
		dir := program[:strings.LastIndexAny(program, `\/`)+1]
		for _, root := range []string{`node_modules\`, `..\`} { // installed globally; in a project's node_modules\.bin
			if js := dir + root + `@github\copilot\npm-loader.js`; l.file(js, false) == nil {
				return l.node(js)
			}
		}
		if !isBatch(program) {
			return "", nil, fmt.Errorf("%s is a PowerShell script; name the program behind it", quote(program))
		}
	case l.goos != "windows":
		if interpreter := l.interpreter(program); interpreter != "" {
			if _, err := l.search(interpreter); err != nil {
				return "", nil, fmt.Errorf("interpreter of its #! line: %w", err)
			}
		}
	}
	return program, nil, nil
}

// node runs a script.
func (l *lookup) node(script string) (string, []string, error) {
	program, err := l.search("node")
	if err != nil {
		return "", nil, fmt.Errorf("interpreter of a .js file: %w", err)
	}
	return program, []string{script}, nil
}

// interpreter is the program that the #! line of a script names, "" if there is none.
func (l *lookup) interpreter(name string) string {
	line, _, _ := strings.Cut(l.head(name), "\n")
	line, ok := strings.CutPrefix(line, "#!")
	fields := strings.Fields(line)
	if !ok || len(fields) == 0 {
		return ""
	}
	if !strings.HasSuffix(fields[0], "/env") {
		return fields[0]
	}
	for _, f := range fields[1:] {
		if !strings.HasPrefix(f, "-") && !strings.Contains(f, "=") { // env's options and assignments
			return f
		}
	}
	return ""
}

// isPath tells a path from a bare name.
func (l *lookup) isPath(name string) bool {
	if l.goos == "windows" {
		return strings.ContainsAny(name, `\/:`)
	}
	return strings.Contains(name, "/")
}

// exists gives the file that name, a path, stands for: on Windows one of the usual suffixes may be missing.
func (l *lookup) exists(name string) (string, error) {
	if l.goos != "windows" || isScript(name) {
		return name, l.file(name, !isScript(name))
	}
	exts := strings.Split(cmp.Or(l.pathExt, ".com;.exe;.bat;.cmd"), ";")
	known := hasSuffixFold(name, ".ps1")
	for _, ext := range exts {
		known = known || ext != "" && hasSuffixFold(name, ext)
	}
	if known {
		return name, l.file(name, true)
	}
	for _, ext := range exts {
		if ext != "" && l.file(name+ext, true) == nil {
			return name + ext, nil
		}
	}
	return "", fmt.Errorf("%s with one of %s: %w", quote(name), quote(strings.Join(exts, " ")), fs.ErrNotExist)
}

// search looks for a program in PATH, or takes a path as it is. Like os/exec it refuses what it finds by way of the
// current directory.
func (l *lookup) search(name string) (string, error) {
	if l.isPath(name) {
		return l.exists(name)
	}
	list, sep := strings.Split(l.path, ":"), "/"
	if l.goos == "windows" {
		list, sep = append([]string{"."}, strings.Split(l.path, ";")...), `\`
		list = slices.DeleteFunc(list, func(dir string) bool { return dir == "" })
	}
	var denied error
	for _, dir := range list {
		dir = strings.Trim(cmp.Or(dir, "."), `"`)
		program, err := l.exists(strings.TrimSuffix(dir, sep) + sep + name)
		if errors.Is(err, fs.ErrPermission) {
			denied = err
		}
		if err != nil {
			continue
		}
		if strings.HasPrefix(dir, "/") || l.goos == "windows" && (strings.HasPrefix(dir, `\\`) || len(dir) > 2 && dir[1] == ':' && (dir[2] == '\\' || dir[2] == '/')) {
			return program, nil
		}
		return "", fmt.Errorf("%s: %w", quote(program), exec.ErrDot)
	}
	if denied != nil {
		return "", denied
	}
	return "", fmt.Errorf("%s is not in PATH %s: %w", quote(name), quote(l.path), exec.ErrNotFound)
}

func isScript(name string) bool {
	return hasSuffixFold(name, ".js") || hasSuffixFold(name, ".mjs") || hasSuffixFold(name, ".cjs")
}

func isBatch(name string) bool {
	return hasSuffixFold(name, ".cmd") || hasSuffixFold(name, ".bat")
}

// unsafeInBatch reports characters that cmd.exe gives a meaning, quoted or not.
func unsafeInBatch(arg string) bool {
	return strings.ContainsAny(arg, "\"%!&|<>^()\r\n")
}

func hasSuffixFold(s, suffix string) bool {
	return len(s) >= len(suffix) && strings.EqualFold(s[len(s)-len(suffix):], suffix)
}

// parseAddr turns an address that users write (host:port, a bare port, http://host:port) into one for net.Dial. The
// CLI listens on IPv4 only, so localhost means 127.0.0.1. A scheme is spelling only: the connection is plain TCP.
func parseAddr(s string) (string, error) {
	bad := func(why string) (string, error) {
		return "", fmt.Errorf("%w: address %s: %s", ErrInvalidConfig, quote(s), why)
	}
	addr := s
	if strings.Contains(s, "://") {
		u, err := url.Parse(s)
		if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || strings.Trim(u.Path, "/") != "" || u.RawQuery != "" || u.Fragment != "" {
			return bad("not http://host:port")
		}
		addr = u.Host
	}
	host, port := "", addr
	if strings.ContainsAny(addr, ":[]") {
		var err error
		if host, port, err = net.SplitHostPort(addr); err != nil {
			return bad("not host:port")
		}
		if host == "" || strings.ContainsAny(host, " /\\@?#") {
			return bad("bad host")
		}
	}
	if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return bad("the port is not in 1..65535")
	}
	if host == "" || strings.EqualFold(host, "localhost") {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port), nil
}

// ---- the process ----

// process is a child that was launched.
type process struct {
	stdin  io.WriteCloser // nil over TCP
	stdout io.ReadCloser  // over TCP the process reads it itself; else read it to its end, or close it

	cmd  *exec.Cmd
	tail *stderrTail
	copy *copier // nil without a writer

	tailDone  chan struct{} // closed when stderr has ended
	scan      portScanner   // over TCP
	portKnown chan struct{} // over TCP: closed when the search for the port is over
	port      int           // 0 if it failed

	left  chan struct{} // closed when the child has ended; it may not be reaped yet
	hurry chan struct{} // closed by the first forced stop: no more grace for anybody
	done  chan struct{} // closed when it is reaped

	mu       sync.Mutex
	family   family          // the child with what it started; signals go out under mu
	kill     func() error    // family.kill; a field so that a test can refuse
	ending   bool            // somebody is stopping it gracefully
	termed   bool            // it was asked to terminate
	reaped   bool            // no signal any more
	leftover error           // what of the family could not be killed
	forced   *ForcedShutdown // the one handle
}

// start launches the program. From then on the process must be ended, or end by itself.
func (c *command) start() (*process, error) {
	cmd := exec.Command(c.path, c.args...)
	cmd.Dir, cmd.Env = c.dir, c.env
	cmd.SysProcAttr = childAttr(c.stdio)
	p := &process{
		cmd:      cmd,
		tail:     &stderrTail{secrets: c.secrets},
		tailDone: make(chan struct{}),
		left:     make(chan struct{}),
		hurry:    make(chan struct{}),
		done:     make(chan struct{}),
	}
	p.kill = p.family.kill

	// Pipes of our own: os/exec then copies nothing, so that Wait depends on the child alone, and loses nothing.
	var ours, theirs []io.Closer
	closeAll := func(files []io.Closer) {
		for _, f := range files {
			f.Close()
		}
	}
	outR, outW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	ours, theirs = append(ours, outR), append(theirs, outW)
	errR, errW, err := os.Pipe()
	if err != nil {
		closeAll(append(ours, theirs...))
		return nil, err
	}
	ours, theirs = append(ours, errR), append(theirs, errW)
	cmd.Stdout, cmd.Stderr = outW, errW
	if c.stdio {
		inR, inW, err := os.Pipe()
		if err != nil {
			closeAll(append(ours, theirs...))
			return nil, err
		}
		ours, theirs = append(ours, inW), append(theirs, inR)
		cmd.Stdin, p.stdin = inR, inW
	}
	stdout, stderr := &lastPipe{f: outR}, &lastPipe{f: errR}
	p.stdout = stdout

	started := make(chan error)
	// The wait goroutine: owner of the child, ends with the reaping. Nobody waits for the goroutine itself.
	go p.own(started, stdout, stderr)
	err = <-started
	closeAll(theirs)
	if err != nil {
		closeAll(ours)
		return nil, fmt.Errorf("%s: %w", c, err)
	}

	if c.stderr != nil {
		p.copy = newCopier(c.stderr, c.logger)
		// The copier's goroutine: ends when stderr has ended and its rest is written, or when the user's writer
		// fails; a writer that never returns keeps it.
		go p.copy.run()
	}
	// The stderr goroutine: ends with the pipe, at the latest a moment after the child.
	go p.drainStderr(stderr)
	if !c.stdio {
		p.scan.secrets = c.secrets
		p.portKnown = make(chan struct{})
		// The stdout goroutine over TCP: ends with the pipe, at the latest a moment after the child.
		go p.drainStdout(stdout)
	}
	return p, nil
}

// own starts the child, waits for its end and reaps it. On Linux a death signal is tied to the thread that started
// the child, so this goroutine keeps its thread all the time.
func (p *process) own(started chan<- error, stdout, stderr *lastPipe) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err := p.cmd.Start()
	if err == nil {
		if err = p.family.adopt(p.cmd.Process); err != nil {
			p.cmd.Process.Kill()
			p.cmd.Wait()
		}
	}
	started <- err
	if err != nil {
		return
	}

	watched := p.family.awaitEnd()
	if !watched { // the system cannot tell the end without reaping
		err = p.cmd.Wait()
		p.mu.Lock()
		p.reaped = true
		p.mu.Unlock()
	}
	close(p.left)

	// The child is gone, but its number is not free yet: now what it left behind can be reached for the last time.
	// Somebody who stops it gracefully grants that the same grace; the end of the grace is a forced stop.
	p.mu.Lock()
	graceful := p.ending && !p.reaped
	p.mu.Unlock()
	if graceful {
		p.awaitFamily(nil)
	}
	p.mu.Lock()
	var leftover, refused error
	if !p.reaped {
		refused = p.kill()
	}
	p.mu.Unlock()
	limit := time.NewTimer(familyWait)
	if !p.awaitFamily(limit.C) {
		leftover = cmp.Or(refused, errors.New("some of its descendants are still there"))
	}
	limit.Stop()

	p.mu.Lock()
	if watched {
		err = p.cmd.Wait() // does not block
	}
	p.reaped = true
	if p.cmd.ProcessState == nil {
		leftover = err // somebody else reaped it
	}
	if leftover != nil {
		p.leftover = fmt.Errorf("%w: process %d: %w", ErrNotConfirmed, p.pid(), leftover)
	}
	p.family.release()
	if p.forced != nil {
		p.forced.settle(p.cmd.ProcessState, p.leftover)
	}
	p.mu.Unlock()

	if p.stdin != nil {
		p.stdin.Close()
	}
	stdout.expire(stdoutLinger)
	stderr.expire(stderrLinger)
	close(p.done)
}

// awaitFamily waits until nobody but the ended child itself is left of its family, and reports whether that came
// before limit or, without a limit, before a forced stop.
func (p *process) awaitFamily(limit <-chan time.Time) bool {
	hurry := p.hurry
	if limit != nil {
		hurry = nil
	}
	tick := time.NewTicker(5 * time.Millisecond) // no system has an event for the end of a group
	defer tick.Stop()
	for {
		p.mu.Lock()
		gone := p.reaped || !p.family.remains()
		p.mu.Unlock()
		if gone {
			return true
		}
		select {
		case <-tick.C:
		case <-hurry:
			return false
		case <-limit:
			return false
		}
	}
}

// pid is the child's number.
func (p *process) pid() int { return p.cmd.Process.Pid }

// exited is closed when the child has been reaped.
func (p *process) exited() <-chan struct{} { return p.done }

// exitError describes the child's end, once exited is closed. It waits a moment for the last of stderr.
func (p *process) exitError() *ExitError {
	p.awaitStderr()
	return &ExitError{State: p.cmd.ProcessState, Stderr: p.tail.String()}
}

// awaitStderr waits until stderr has been read, which its pipe's deadline bounds, and copied, but not for long: the
// user's writer may be slow.
func (p *process) awaitStderr() {
	t := time.NewTimer(stderrBackstop)
	defer t.Stop()
	select {
	case <-p.tailDone:
	case <-t.C:
		return
	}
	if p.copy != nil {
		t.Reset(copyWait)
		select {
		case <-p.copy.done:
		case <-t.C:
		}
	}
}

// end stops the child: close its stdin and wait, ask it to terminate and wait, kill it and wait, each for grace at
// most. Without a stdin to close, the first step is taken only if the server was asked to leave by other means. When
// ctx ends, it goes straight to the kill and waits for a second at most. It returns nil only when the child has been
// reaped, else an error that matches ErrNotConfirmed. Calls may be concurrent, and repeated.
func (p *process) end(ctx context.Context, grace time.Duration, asked bool) error {
	p.mu.Lock()
	p.ending = true
	p.mu.Unlock()
	gone := func() error {
		p.awaitStderr()
		p.mu.Lock()
		defer p.mu.Unlock()
		return p.leftover
	}
	wait := func(left <-chan struct{}) bool {
		t := time.NewTimer(grace)
		defer t.Stop()
		select {
		case <-p.done:
			return true
		case <-left:
		case <-t.C:
		case <-ctx.Done():
		case <-p.hurry:
		}
		return false
	}
	if p.stdin != nil {
		p.stdin.Close()
		asked = true
	}
	// When the child leaves before its descendants, these are told at once: they may not have read stdin.
	if asked && wait(p.left) {
		return gone()
	}
	if ctx.Err() == nil && p.terminate() && wait(nil) {
		return gone()
	}
	f := p.forceStop()
	t := time.NewTimer(max(grace, killWait))
	defer t.Stop()
	select {
	case <-f.done:
	case <-t.C:
	case <-ctx.Done():
		t.Reset(killWait)
		select {
		case <-f.done:
		case <-t.C:
		}
	}
	select {
	case <-f.done:
		p.awaitStderr()
		return f.err
	default:
	}
	err := fmt.Errorf("%w: process %d was killed, but not reaped yet", ErrNotConfirmed, p.pid())
	if ctx.Err() != nil {
		err = fmt.Errorf("%w: %w", err, contextError(ctx))
	}
	return err
}

// terminate asks the family to leave, once, and reports whether it makes sense to wait for that.
func (p *process) terminate() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reaped || p.termed {
		return true
	}
	p.termed = p.family.terminate() == nil
	return p.termed
}

// forceStop kills the child and its descendants before it returns. All calls share one outcome.
func (p *process) forceStop() *ForcedShutdown {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.forced != nil {
		return p.forced
	}
	p.forced = &ForcedShutdown{pid: p.pid(), done: make(chan struct{})}
	close(p.hurry)
	if p.reaped {
		p.forced.settle(p.cmd.ProcessState, p.leftover)
		return p.forced
	}
	if err := p.kill(); err != nil {
		p.forced.settle(nil, fmt.Errorf("%w: process %d: %w", ErrNotConfirmed, p.pid(), err))
	}
	return p.forced
}

// ForcedShutdown is the outcome of a forced stop, the same for everybody who asks, early or late. Its methods are
// safe for concurrent use.
type ForcedShutdown struct {
	pid   int
	done  chan struct{} // closed when state and err are final
	state *os.ProcessState
	err   error
}

// noShutdown is the forced stop of a client that launched no process.
func noShutdown() *ForcedShutdown {
	f := &ForcedShutdown{done: make(chan struct{})}
	close(f.done)
	return f
}

// settle publishes the outcome; the first one stays.
func (f *ForcedShutdown) settle(state *os.ProcessState, err error) {
	select {
	case <-f.done:
	default:
		f.state, f.err = state, err
		close(f.done)
	}
}

// PID returns the process id of the child, 0 if the client launched none.
func (f *ForcedShutdown) PID() int { return f.pid }

// Done returns a channel that is closed when the outcome is known: the child has been reaped, or the system refused
// the kill.
func (f *ForcedShutdown) Done() <-chan struct{} { return f.done }

// Wait waits for the outcome, or for the end of ctx; giving up here gives nothing up elsewhere. It returns the state
// with which the child ended, and nil, nil if the client launched no process. An error matches [ErrNotConfirmed]: the
// system refused the kill, which stays an error even if the child leaves by itself later; or a descendant could not
// be killed; or ctx ended first, and then its cause matches too.
func (f *ForcedShutdown) Wait(ctx context.Context) (*os.ProcessState, error) {
	select {
	case <-f.done:
		return f.state, f.err
	default:
	}
	select {
	case <-f.done:
		return f.state, f.err
	case <-ctx.Done():
		return nil, fmt.Errorf("%w: process %d is not reaped yet: %w", ErrNotConfirmed, f.pid, contextError(ctx))
	}
}

// ---- output ----

// lastPipe is the read end of one of the child's outputs. When the child has ended it still gives what lies in the
// pipe, and then ends, although a descendant may hold the other end. One goroutine reads at a time.
type lastPipe struct {
	f    *os.File
	over bool // the time after the child's end is up
	late int  // bytes read since
}

func (r *lastPipe) Read(b []byte) (int, error) {
	if !r.over {
		n, err := r.f.Read(b)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return n, err
		}
		r.over = true
	}
	if r.late >= lateBytes {
		return 0, io.EOF
	}
	r.expire(10 * time.Millisecond) // a deadline in the past would not even look into the pipe
	n, err := r.f.Read(b)
	r.late += n
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = io.EOF
	}
	return n, err
}

func (r *lastPipe) Close() error { return r.f.Close() }

// expire lets the pipe end after d. Where pipes have no deadlines (Windows), the end of the whole family, which the
// job object sees to, closes the other end.
func (r *lastPipe) expire(d time.Duration) { r.f.SetReadDeadline(time.Now().Add(d)) }

// drainStderr reads stderr to its end: a child must never wait for us to read it.
func (p *process) drainStderr(r *lastPipe) {
	defer r.Close()
	defer close(p.tailDone)
	if p.copy != nil {
		defer p.copy.finish()
	}
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		p.tail.write(buf[:n])
		if p.copy != nil {
			p.copy.put(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// stderrTail keeps the end of stderr.
type stderrTail struct {
	secrets []string

	mu  sync.Mutex
	buf []byte
	cut bool // the beginning is gone
}

// spare is how many bytes more are kept than shown, so that a secret at the cut can be recognized, or is not shown.
func (t *stderrTail) spare() int {
	return max(utf8.UTFMax, longest(t.secrets))
}

func (t *stderrTail) write(b []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.buf = append(t.buf, b...)
	keep := tailBytes + t.spare()
	if len(t.buf) > 2*keep { // not at every write
		t.buf = append(t.buf[:0], t.buf[len(t.buf)-keep:]...)
		t.cut = true
	}
}

// String is the tail as it may be shown.
func (t *stderrTail) String() string {
	t.mu.Lock()
	b, cut := t.buf, t.cut
	if keep := tailBytes + t.spare(); len(b) > keep {
		b, cut = b[len(b)-keep:], true
	}
	s := mask(string(b), t.secrets)
	t.mu.Unlock()
	if cut {
		s = s[min(len(s), t.spare()):]
	}
	if len(s) > tailBytes {
		s = s[len(s)-tailBytes:]
		cut = true
	}
	for cut && s != "" && !utf8.RuneStart(s[0]) {
		s = s[1:]
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

// copier hands stderr to the user's writer, which may be slow, fail or panic, without making anybody wait. What
// cannot be queued is dropped, and a line in the stream says how much.
type copier struct {
	w    io.Writer
	log  *slog.Logger  // may be nil
	wake chan struct{} // 1 slot
	done chan struct{} // closed when nothing more will be written

	mu      sync.Mutex
	queue   []byte
	dropped int  // bytes after the queue
	ended   bool // nothing will follow
}

func newCopier(w io.Writer, log *slog.Logger) *copier {
	return &copier{w: w, log: log, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

func (c *copier) put(b []byte) {
	select {
	case <-c.done:
		return // the writer failed
	default:
	}
	c.mu.Lock()
	if c.dropped > 0 || len(c.queue)+len(b) > queueBytes {
		c.dropped += len(b)
	} else {
		c.queue = append(c.queue, b...)
	}
	c.mu.Unlock()
	c.signal()
}

func (c *copier) finish() {
	c.mu.Lock()
	c.ended = true
	c.mu.Unlock()
	c.signal()
}

func (c *copier) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

func (c *copier) run() {
	defer close(c.done)
	defer func() {
		// The writer's panic ends its copy, and nothing else.
		if v := recover(); v != nil && c.log != nil {
			c.log.Error("Options.Stderr panicked", "panic", v, "stack", string(debug.Stack()))
		}
	}()
	for {
		<-c.wake
		c.mu.Lock()
		b, dropped, ended := c.queue, c.dropped, c.ended
		c.queue, c.dropped = nil, 0
		c.mu.Unlock()
		if dropped > 0 {
			if !bytes.HasSuffix(b, []byte("\n")) {
				b = append(b, '\n')
			}
			b = fmt.Appendf(b, "[copilot: %d bytes of stderr dropped: the writer is too slow]\n", dropped)
		}
		if len(b) > 0 {
			if _, err := c.w.Write(b); err != nil {
				return
			}
		}
		if ended {
			return
		}
	}
}

// listenPort waits for the port that a CLI started with TCP announces. The error is an *ExitError if the CLI ended
// before, else a *ListenError, which comes with ctx's own if that ended first.
func (p *process) listenPort(ctx context.Context) (int, error) {
	select {
	case <-p.portKnown:
	case <-ctx.Done():
		return 0, fmt.Errorf("%w: %w", p.scan.error(), contextError(ctx))
	}
	if p.port == 0 && p.scan.ended {
		t := time.NewTimer(killWait) // the reaping may be a moment behind the end of stdout
		defer t.Stop()
		select {
		case <-p.done:
			return 0, p.exitError()
		case <-ctx.Done():
		case <-t.C:
		}
	}
	if p.port == 0 {
		return 0, p.scan.error()
	}
	return p.port, nil
}

// drainStdout finds the announcement on the stdout of a TCP server, and goes on reading: the server must never wait
// for us to read it.
func (p *process) drainStdout(r *lastPipe) {
	defer r.Close()
	buf := make([]byte, 4<<10)
	for known := false; ; {
		n, err := r.Read(buf)
		if !known {
			if p.port, known = p.scan.write(buf[:n], err != nil); known {
				close(p.portKnown)
			}
		}
		if err != nil {
			return
		}
	}
}

// portScanner looks for the line that announces the port.
type portScanner struct {
	secrets []string

	mu    sync.Mutex
	head  []byte // the beginning of the output or, when that is known, the line at fault; with room for a secret at its end
	line  []byte // the beginning of the current line
	ended bool   // stdout ended without an announcement
}

var portLine = regexp.MustCompile(`(?i)\blistening on port\s+(\S*)`)

// write takes the next piece of stdout, and its end. It reports whether the search is over; the port is 0 then if it
// failed.
func (s *portScanner) write(b []byte, end bool) (port int, over bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	keep := maxQuote + longest(s.secrets)
	s.head = append(s.head, b[:min(len(b), keep-len(s.head))]...)
	for len(b) > 0 || end {
		piece, rest, whole := bytes.Cut(b, []byte("\n"))
		s.line = append(s.line, piece[:min(len(piece), 4*maxQuote-len(s.line))]...)
		if !whole && !end {
			return 0, false
		}
		if m := portLine.FindSubmatch(s.line); m != nil {
			n, err := strconv.ParseUint(strings.TrimRight(string(m[1]), ".,;"), 10, 16)
			if err != nil || n == 0 {
				s.head = append(s.head[:0], s.line[:min(len(s.line), keep)]...)
				return 0, true
			}
			return int(n), true
		}
		if !whole {
			s.ended = true
			return 0, true
		}
		b, s.line = rest, s.line[:0]
	}
	return 0, false
}

func (s *portScanner) error() *ListenError {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := mask(string(s.head), s.secrets)
	if len(s.head) == maxQuote+longest(s.secrets) {
		out = out[:max(0, len(out)-longest(s.secrets))] // may be half a secret
	}
	return &ListenError{Output: strings.ToValidUTF8(out[:min(len(out), maxQuote)], "")}
}

// InstallCLI writes an executable, such as one that a program carries by go:embed, to a file for [Options.CLI], and returns its path. The
// file's name in dir holds the SHA-256 of its contents; dir "" means copilot-go in the user's cache directory (see [os.UserCacheDir]). A file
// that is there already, whole and executable, is left alone, else it is replaced atomically: installs at the same time, in several
// processes, do not disturb each other, nor programs that run. Nobody else should be able to write to dir.
//
// What is installed is verified each time, which means reading both; cli should be an [io.Seeker] too, as a [bytes.Reader] is, so
// that nothing needs to be written for that. ctx bounds the call.
func InstallCLI(ctx context.Context, dir string, cli io.Reader) (path string, err error) {
	if path, err = installCLI(ctx, dir, cli); err != nil {
		return "", fmt.Errorf("copilot: install CLI: %w", err)
	}
	return path, nil
}

func installCLI(ctx context.Context, dir string, cli io.Reader) (string, error) {
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", err
		}
		dir = filepath.Join(cache, "copilot-go")
	}
	target := func(sum []byte) string {
		name := "copilot-" + hex.EncodeToString(sum)
		if runtime.GOOS == "windows" {
			name += ".exe"
		}
		return filepath.Join(dir, name)
	}
	if s, ok := cli.(io.Seeker); ok {
		if start, err := s.Seek(0, io.SeekCurrent); err == nil {
			sum, err := checksum(ctx, io.Discard, cli)
			if err != nil {
				return "", err
			}
			if path := target(sum); isInstalled(ctx, path, sum) {
				return path, nil
			}
			if _, err := s.Seek(start, io.SeekStart); err != nil {
				return "", err
			}
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", err
	}
	f, err := os.CreateTemp(dir, ".copilot-*")
	if err != nil {
		return "", err
	}
	defer os.Remove(f.Name()) // fails once it has been renamed
	sum, err := checksum(ctx, f, cli)
	if closing := f.Close(); err == nil {
		err = closing
	}
	if err == nil {
		err = os.Chmod(f.Name(), 0o755)
	}
	if err != nil {
		return "", err
	}
	path := target(sum)
	if isInstalled(ctx, path, sum) {
		return path, nil
	}
	if err := os.Rename(f.Name(), path); err != nil && !isInstalled(ctx, path, sum) { // Windows replaces no program that runs
		return "", err
	}
	return path, nil
}

// checksum copies r to w and returns the SHA-256 of it.
func checksum(ctx context.Context, w io.Writer, r io.Reader) ([]byte, error) {
	h := sha256.New()
	n, err := io.Copy(io.MultiWriter(h, w), contextReader{ctx, r})
	if err == nil && n == 0 {
		err = errors.New("there are no contents")
	}
	return h.Sum(nil), err
}

// contextReader stops reading when ctx is done.
type contextReader struct {
	ctx context.Context
	r   io.Reader
}

func (r contextReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, contextError(r.ctx)
	}
	return r.r.Read(p)
}

// isInstalled reports whether path is an executable file with this SHA-256, and not a link.
func isInstalled(ctx context.Context, path string, sum []byte) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() || runtime.GOOS != "windows" && info.Mode().Perm() != 0o755 {
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	got, err := checksum(ctx, io.Discard, f)
	return err == nil && bytes.Equal(got, sum)
}
