package copilot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"
)

// goTool runs the go command without network, in dir.
func goTool(t *testing.T, dir string, args ...string) {
	t.Helper()
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOPROXY=off", "GOWORK=off", "GOFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("go %s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// buildChat builds examples/chat and returns how to run it: without a CLI and without anything of the user's.
func buildChat(t *testing.T) func(args ...string) *exec.Cmd {
	t.Helper()
	if testing.Short() {
		t.Skip("skipped: builds a program")
	}
	bin := filepath.Join(t.TempDir(), "chat.exe")
	goTool(t, ".", "build", "-o", bin, "./examples/chat")
	return func(args ...string) *exec.Cmd {
		cmd := exec.Command(bin, args...)
		home := t.TempDir()
		cmd.Dir = home
		for _, v := range os.Environ() {
			if name, _, _ := strings.Cut(v, "="); !strings.HasPrefix(name, "COPILOT_") && !strings.HasPrefix(name, "GITHUB_") && name != "GH_TOKEN" && name != "PATH" {
				cmd.Env = append(cmd.Env, v)
			}
		}
		cmd.Env = append(cmd.Env, "HOME="+home, "COPILOT_HOME="+home, "PATH="+home)
		return cmd
	}
}

// withCLI lets cmd find the real CLI, and skips the test where there is none.
func withCLI(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	cli := os.Getenv("COPILOT_CLI_PATH")
	if cli == "" {
		t.Skip("skipped: COPILOT_CLI_PATH names no CLI to test against")
	}
	cmd.Env = append(cmd.Env, "COPILOT_CLI_PATH="+cli, "PATH="+os.Getenv("PATH"))
}

// runChat runs cmd to its end, at most patience, and returns what it wrote and its exit code.
func runChat(t *testing.T, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	code = waitChat(t, cmd)
	return out.String(), errOut.String(), code
}

func waitChat(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	backstop := time.AfterFunc(3*patience, func() { cmd.Process.Kill() })
	defer backstop.Stop()
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Error(err)
	}
	if left := mentioning(cmd.Dir); left != nil {
		t.Errorf("left behind: %v", left)
	}
	return cmd.ProcessState.ExitCode()
}

// mentioning lists the processes that have dir in their environment. Linux only.
func mentioning(dir string) (pids []string) {
	found, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, name := range found {
		if b, err := os.ReadFile(name); err == nil && bytes.Contains(b, []byte("="+dir+"\x00")) {
			pids = append(pids, filepath.Base(filepath.Dir(name)))
		}
	}
	return pids
}

func TestExampleChatDemo(t *testing.T) {
	chat := buildChat(t)
	for _, tt := range []struct {
		name, stdin    string
		args           []string
		stdout, stderr string // patterns
		code           int
	}{
		{name: "argument", args: []string{"-demo", "hello"}, stdout: `^This is a demo.*"hello".*\nThe die shows [1-6].*reject\.\n$`, stderr: `-> roll_dice \{"sides":6\}\n(.*\n)*<- "[1-6]"\n`},
		{name: "lines", stdin: "one\n\ntwo", args: []string{"-demo", "-yes"}, stdout: `"one".*\n.*approve-once\.\n.*"two".*\n.*approve-once\.\n$`, stderr: `^-> roll`},
		{name: "nobody to ask", args: []string{"-demo", "hello"}, stdout: `reject`, stderr: `refused: shell "date"`},
		{name: "arguments leave standard input alone", stdin: "three\n", args: []string{"-demo", "one", "two"}, stdout: `"one".*\n.*\n.*"two".*\n.*\n$`},
		{name: "nothing to say", args: []string{"-demo"}, stdout: `^$`, stderr: `^$`},
		{name: "no CLI", args: []string{"hello"}, stdout: `"hello"`, stderr: `no Copilot CLI found.*\nThis is the demo\.`},
		{name: "bad flag", args: []string{"-nonsense"}, stdout: `^$`, stderr: `-nonsense`, code: 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := chat(tt.args...)
			cmd.Stdin = strings.NewReader(tt.stdin)
			stdout, stderr, code := runChat(t, cmd)
			if !regexp.MustCompile(tt.stdout).MatchString(stdout) || !regexp.MustCompile(tt.stderr).MatchString(stderr) || code != tt.code {
				t.Errorf("exit code %d, want %d\n%s\nwant %s\n%s\nwant %s", code, tt.code, stdout, tt.stdout, stderr, tt.stderr)
			}
		})
	}
}

// An interrupt ends the turn, and with it a conversation that nobody types; at the prompt it ends the conversation.
func TestExampleChatInterrupt(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("skipped: no interrupts between processes")
	}
	chat := buildChat(t)
	for _, tt := range []struct{ name, after, stderr string }{
		{"turn", "This", "turn aborted"},
		{"prompt", "reject.\n", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			cmd := chat("-demo")
			stdin, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer stdin.Close()
			stdout, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			var stderr bytes.Buffer
			cmd.Stderr = &stderr
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			io.WriteString(stdin, "hello\n")
			readUntil(t, stdout, tt.after)
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Error(err)
			}
			rest, _ := io.ReadAll(stdout)
			if code := waitChat(t, cmd); code != 130 {
				t.Errorf("exit code %d, want 130", code)
			}
			if strings.Contains(string(rest), "die shows") {
				t.Errorf("the turn went on: %q", rest)
			}
			if !strings.Contains(stderr.String(), tt.stderr) {
				t.Errorf("got %q, want %q", stderr.String(), tt.stderr)
			}
		})
	}
}

// readUntil reads until the text has come.
func readUntil(t *testing.T, r io.Reader, text string) {
	t.Helper()
	var got []byte
	for b := make([]byte, 1); !bytes.Contains(got, []byte(text)); got = append(got, b...) {
		if _, err := io.ReadFull(r, b); err != nil {
			t.Fatalf("got %q, want %q: %v", got, text, err)
		}
	}
}

func TestRealExampleChat(t *testing.T) {
	chat := buildChat(t)
	t.Run("turn", func(t *testing.T) {
		model := newModelServer(t)
		cmd := chat("-base-url", model.URL+"/v1", "-model", "fake-model", `call: roll_dice {"sides":1}`, "say: good bye")
		withCLI(t, cmd)
		stdout, stderr, code := runChat(t, cmd)
		if want := "tool said: 1\ngood bye\n"; stdout != want || code != 0 {
			t.Errorf("exit code %d, got %q, want %q\n%s", code, stdout, want, stderr)
		}
	})
	t.Run("refused permission", func(t *testing.T) {
		model := newModelServer(t)
		cmd := chat("-base-url", model.URL+"/v1", "-model", "fake-model", `call: bash {"command":"touch made","description":"make a file"}`)
		withCLI(t, cmd)
		stdout, stderr, code := runChat(t, cmd)
		if !strings.Contains(stdout, "nobody is there") || code != 0 {
			t.Errorf("exit code %d, got %q\n%s", code, stdout, stderr)
		}
		if _, err := os.Stat(filepath.Join(cmd.Dir, "made")); err == nil {
			t.Error("the command ran")
		}
	})
	t.Run("interrupt", func(t *testing.T) {
		if runtime.GOOS == "windows" {
			t.Skip("skipped: no interrupts between processes")
		}
		model := newModelServer(t)
		cmd := chat("-base-url", model.URL+"/v1", "-model", "fake-model", "hold: one two")
		withCLI(t, cmd)
		var stderr bytes.Buffer
		cmd.Stderr = &stderr
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Process.Kill()
		await(t, "the model's first word", model.Held)
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Error(err)
		}
		code := waitChat(t, cmd)
		if !strings.Contains(stderr.String(), "aborted") || code != 130 {
			t.Errorf("exit code %d\n%s", code, stderr.String())
		}
	})
	t.Run("no login", func(t *testing.T) {
		cmd := chat("hello")
		withCLI(t, cmd)
		stdout, stderr, code := runChat(t, cmd)
		if !strings.Contains(stderr, "copilot login") || stdout != "" || code != 1 {
			t.Errorf("exit code %d, got %q\n%s", code, stdout, stderr)
		}
	})
}

// README's program is built as README says that a vendored build is made.
func TestReadme(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped: builds a program")
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```(go|sh)\n(.*?)```").FindAllStringSubmatch(string(readme), -1)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module example.com/app\n\ngo 1.23\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	copySource(t, filepath.Join(dir, "third_party", "copilot"))
	programs, commands := 0, 0
	for _, block := range blocks {
		switch text := block[2]; {
		case block[1] == "go":
			programs++
			sub := filepath.Join(dir, "cmd", fmt.Sprint("program", programs))
			if err := os.MkdirAll(sub, 0o777); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(sub, "main.go"), []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
		case strings.Contains(text, "-replace="):
			for _, line := range strings.Split(strings.TrimSpace(text), "\n") {
				commands++
				goTool(t, dir, strings.Fields(line)[1:]...)
			}
		}
	}
	if programs == 0 || commands == 0 {
		t.Fatalf("found %d programs and %d commands", programs, commands)
	}
	goTool(t, dir, "vet", "-mod=vendor", "./...")
	if _, err := os.Stat(filepath.Join(dir, "go.sum")); err == nil {
		t.Error("there is a go.sum")
	}
}

// copySource copies what a dependent needs: the Go files and go.mod.
func copySource(t *testing.T, to string) {
	t.Helper()
	if err := os.MkdirAll(to, 0o777); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append(files, "go.mod", "LICENSE") {
		b, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(to, name), b, 0o666)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}
