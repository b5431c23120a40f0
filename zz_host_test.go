package copilot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"testing/iotest"
	"time"
)

// mapFS is a SessionFS in memory.
type mapFS struct {
	mu    sync.Mutex
	files fstest.MapFS
}

func newMapFS() *mapFS { return &mapFS{files: make(fstest.MapFS)} }

func hostKey(name string) string {
	if key := strings.Trim(path.Clean(name), "/"); key != "" {
		return key
	}
	return "."
}

func (m *mapFS) put(name string, data []byte, perm fs.FileMode) {
	m.files[hostKey(name)] = &fstest.MapFile{Data: data, Mode: perm}
}

func (m *mapFS) ReadFile(ctx context.Context, name string) ([]byte, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files.ReadFile(hostKey(name))
}

func (m *mapFS) WriteFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put(name, data, perm)
	return nil
}

func (m *mapFS) AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	old, _ := m.files.ReadFile(hostKey(name))
	m.put(name, append(old, data...), perm)
	return nil
}

func (m *mapFS) Stat(ctx context.Context, name string) (fs.FileInfo, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files.Stat(hostKey(name))
}

func (m *mapFS) ReadDir(ctx context.Context, name string) ([]fs.DirEntry, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.files.ReadDir(hostKey(name))
}

func (m *mapFS) Mkdir(ctx context.Context, name string, perm fs.FileMode) error {
	if _, err := m.Stat(ctx, name); err == nil {
		return &fs.PathError{Op: "mkdir", Path: name, Err: fs.ErrExist}
	}
	return m.MkdirAll(ctx, name, perm)
}

func (m *mapFS) MkdirAll(ctx context.Context, name string, perm fs.FileMode) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.put(name, nil, perm|fs.ModeDir)
	return nil
}

func (m *mapFS) Remove(ctx context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.files[hostKey(name)] == nil {
		return &fs.PathError{Op: "remove", Path: name, Err: fs.ErrNotExist}
	}
	delete(m.files, hostKey(name))
	return nil
}

func (m *mapFS) RemoveAll(ctx context.Context, name string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for key := range m.files {
		if key == hostKey(name) || strings.HasPrefix(key, hostKey(name)+"/") {
			delete(m.files, key)
		}
	}
	return nil
}

func (m *mapFS) Rename(ctx context.Context, oldName, newName string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.files[hostKey(oldName)]
	if f == nil {
		return &fs.PathError{Op: "rename", Path: oldName, Err: fs.ErrNotExist}
	}
	m.files[hostKey(newName)] = f
	delete(m.files, hostKey(oldName))
	return nil
}

// serveInMemory is a RoundTripper that calls the handler: no connection, no port. The response streams.
type serveInMemory struct{ http.Handler }

func (s serveInMemory) RoundTrip(req *http.Request) (*http.Response, error) {
	body, w := io.Pipe()
	rec := &memoryWriter{header: make(http.Header), body: w, begun: make(chan int, 1)}
	go func() { // ends with the handler, which the request's context ends
		defer func() {
			var err error
			if p := recover(); p != nil {
				err = fmt.Errorf("handler: %v", p)
			}
			rec.WriteHeader(http.StatusOK)
			w.CloseWithError(err)
		}()
		s.ServeHTTP(rec, req)
	}()
	context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
	select {
	case status := <-rec.begun:
		return &http.Response{StatusCode: status, Header: rec.header, Body: body, Request: req}, nil
	case <-req.Context().Done():
		return nil, req.Context().Err()
	}
}

type memoryWriter struct {
	header http.Header
	body   io.Writer
	begun  chan int
	once   sync.Once
}

func (w *memoryWriter) Header() http.Header { return w.header }
func (w *memoryWriter) WriteHeader(status int) {
	w.once.Do(func() {
		w.begun <- status
	})
}
func (w *memoryWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}
func (w *memoryWriter) Flush() {}

type roundTripper func(req *http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

func hostProvider(m *modelServer) *ProviderConfig {
	return &ProviderConfig{Type: "openai", WireAPI: "completions", BaseURL: m.URL + "/v1", APIKey: "dummy"}
}

func TestRealSessionFS(t *testing.T) {
	model := newModelServer(t)
	c := startReal(t, Options{SessionFS: &SessionFSConfig{InitialCWD: "/workspace", StatePath: "/state", Conventions: "posix"}})
	ctx := testContext(t)
	for name, files := range map[string]SessionFS{"map": newMapFS(), "directory": DirFS(t.TempDir())} {
		cfg := &SessionConfig{Model: "fake-model", Provider: hostProvider(model), SessionFS: files}
		s := createSession(t, c, cfg)
		for range 3 {
			if m, err := s.SendAndWait(ctx, Message{Prompt: "say: kept by the host"}); err != nil || m.Content != "kept by the host" {
				t.Fatalf("%s: turn: %v %v", name, m, err)
			}
		}
		if err := s.Disconnect(ctx); err != nil {
			t.Fatal(err)
		}
		log, err := files.ReadFile(ctx, "/state/events.jsonl")
		if err != nil || strings.Count(string(log), "kept by the host") < 6 {
			t.Errorf("%s: the conversation is not there: %v\n%s", name, err, log)
		}
		s, err = c.ResumeSession(ctx, s.ID(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := s.SendAndWait(ctx, Message{Prompt: "history"}); err != nil || !strings.Contains(m.Content, "kept by the host") {
			t.Errorf("%s: resumed: %v %v", name, m, err)
		}
	}
}

func TestRealModelTransport(t *testing.T) {
	model := newModel()
	model.URL = "http://nowhere.invalid"
	var mu sync.Mutex
	var infos []ModelRequest
	cancelled := make(chan struct{}, 1)
	transport := roundTripper(func(req *http.Request) (*http.Response, error) {
		info, _ := ModelRequestFrom(req.Context())
		mu.Lock()
		infos = append(infos, info)
		mu.Unlock()
		context.AfterFunc(req.Context(), func() {
			if errors.Is(context.Cause(req.Context()), errModelCancelled) {
				cancelled <- struct{}{}
			}
		})
		return serveInMemory{model}.RoundTrip(req)
	})
	c := startReal(t, Options{ModelTransport: transport})
	ctx := testContext(t)
	for _, streaming := range []bool{true, false} {
		s := createSession(t, c, &SessionConfig{Model: "fake-model", Streaming: streaming, Provider: hostProvider(model), WorkingDirectory: t.TempDir()})
		if m, err := s.SendAndWait(ctx, Message{Prompt: "say: through a function"}); err != nil || m.Content != "through a function" {
			t.Fatalf("turn: %v %v", m, err)
		}
		var agent *AgentError
		if _, err := s.SendAndWait(ctx, Message{Prompt: "status: 400"}); !errors.As(err, &agent) {
			t.Errorf("a refusal: %v", err)
		}
		mu.Lock()
		if len(infos) == 0 || infos[0].SessionID != s.ID() {
			t.Errorf("requests made for %+v, want the session", infos)
		}
		infos = nil
		mu.Unlock()
	}
	// A turn that is aborted cancels its request.
	s := createSession(t, c, &SessionConfig{Model: "fake-model", Streaming: true, Provider: hostProvider(model), WorkingDirectory: t.TempDir()})
	turn := async(func() error { _, err := s.SendAndWait(ctx, Message{Prompt: "hold: one two"}); return err })
	await(t, "model", model.Held)
	if err := s.Abort(ctx); err != nil {
		t.Fatal(err)
	}
	if err := await(t, "turn", turn); !errors.Is(err, ErrAborted) {
		t.Error(err)
	}
	await(t, "cancellation of the model request", cancelled)
}

func TestRealBearerToken(t *testing.T) {
	model := newModelServer(t)
	c := startReal(t, Options{})
	provider := hostProvider(model)
	provider.APIKey = ""
	n := 0
	provider.BearerTokenProvider = func(ctx context.Context, name string) (string, error) {
		n++ // one request at a time
		return fmt.Sprintf("token-%d-%s", n, name), nil
	}
	s := createSession(t, c, &SessionConfig{Model: "fake-model", Provider: provider, WorkingDirectory: t.TempDir()})
	for range 2 {
		if m, err := s.SendAndWait(testContext(t), Message{Prompt: "say: hello"}); err != nil || m.Content != "hello" {
			t.Fatalf("turn: %v %v", m, err)
		}
	}
	var got []string
	for _, r := range model.Requests() {
		got = append(got, r.Header.Get("Authorization"))
	}
	if want := []string{"Bearer token-1-default", "Bearer token-2-default"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// hostAnswer asks the client and returns its answer as JSON, an error as "code message data".
func hostAnswer(p *peer, method, params string) string {
	p.t.Helper()
	return hostText(p.request(method, json.RawMessage(params)))
}

func hostText(m peerMessage) string {
	if m.Error != nil {
		return strings.TrimSpace(fmt.Sprintf("%d %s %s", m.Error.Code, m.Error.Message, m.Error.Data))
	}
	return string(m.Result)
}

// hostShort leaves out what the system or package json says in an answer.
func hostShort(answer string) string {
	answer = regexp.MustCompile(`("message":"[a-z]+ [^:"]*): [^"]*"`).ReplaceAllString(answer, `$1"`)
	return regexp.MustCompile(`^(-32602 params): json: .*`).ReplaceAllString(answer, "$1")
}

func TestHostingSetUp(t *testing.T) {
	leakCheck(t)
	opts := &Options{
		SessionFS:      &SessionFSConfig{InitialCWD: "/workspace", StatePath: "/state", Conventions: "posix", SQLite: true},
		ModelTransport: serveInMemory{newModel()},
	}
	_, p := newPeer(t, opts)
	var got []string
	for _, m := range p.calls("") {
		got = append(got, m.Method+" "+string(m.Params))
	}
	want := []string{
		`connect {}`,
		`sessionFs.setProvider {"initialCwd":"/workspace","sessionStatePath":"/state","conventions":"posix","capabilities":{"sqlite":true}}`,
		`llmInference.setProvider {}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
	for _, method := range []string{"sessionFs.setProvider", "llmInference.setProvider"} {
		near, far := net.Pipe()
		p := startPeer(t, far)
		p.handle(method, func(*peer, peerMessage) any { return map[string]bool{"success": false} })
		if c, err := NewClient(testContext(t), near, opts); err == nil || !strings.Contains(err.Error(), method) {
			t.Errorf("%s declined: %v %v", method, c, err)
		}
	}
}

func TestSessionFSRefusedEarly(t *testing.T) {
	leakCheck(t)
	declared := func(change func(*SessionFSConfig)) *SessionFSConfig {
		f := &SessionFSConfig{InitialCWD: "/w", StatePath: "/s"}
		change(f)
		return f
	}
	for _, tt := range []struct {
		name   string
		opts   *SessionFSConfig
		cfg    SessionConfig
		client bool // whether the client's options are at fault
	}{
		{name: "no working directory", opts: declared(func(f *SessionFSConfig) { f.InitialCWD = "" }), client: true},
		{name: "no state path", opts: declared(func(f *SessionFSConfig) { f.StatePath = "" }), client: true},
		{name: "unknown conventions", opts: declared(func(f *SessionFSConfig) { f.Conventions = "vms" }), client: true},
		{name: "no files", opts: declared(func(f *SessionFSConfig) {})},
		{name: "nil from New", opts: declared(func(f *SessionFSConfig) { f.New = func(string) SessionFS { return nil } })},
		{name: "no SQLite", opts: declared(func(f *SessionFSConfig) { f.SQLite = true }), cfg: SessionConfig{SessionFS: newMapFS()}},
		{name: "not declared", cfg: SessionConfig{SessionFS: newMapFS()}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			near, far := net.Pipe()
			p := startPeer(t, far)
			c, err := NewClient(testContext(t), near, &Options{SessionFS: tt.opts})
			if tt.client {
				if !errors.Is(err, ErrInvalidConfig) || len(p.calls("")) > 0 {
					t.Errorf("got %v after %v", err, p.calls(""))
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			defer c.ForceStop()
			if _, err := c.CreateSession(testContext(t), &tt.cfg); !errors.Is(err, ErrInvalidConfig) || len(p.calls("session.create")) > 0 {
				t.Errorf("got %v", err)
			}
		})
	}
	// A function of the options serves the sessions that bring nothing.
	files := newMapFS()
	c, p := newPeer(t, &Options{SessionFS: declared(func(f *SessionFSConfig) {
		f.New = func(id string) SessionFS { files.put("/made-for", []byte(id), 0o600); return files }
	})})
	s := createSession(t, c, nil)
	if got, want := hostAnswer(p, "sessionFs.readFile", `{"sessionId":"`+s.ID()+`","path":"/made-for"}`), `{"content":"`+s.ID()+`"}`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

// sqlFS answers SQL as its functions do.
type sqlFS struct {
	*mapFS
	query func(SQLStatement) (SQLResult, error)
}

func (s sqlFS) Query(ctx context.Context, q SQLStatement) (SQLResult, error) { return s.query(q) }
func (s sqlFS) DatabaseExists(ctx context.Context) (bool, error)             { return true, nil }
func (s sqlFS) Transaction(ctx context.Context, qs []SQLStatement) (results []SQLResult, err error) {
	for _, q := range qs {
		r, err := s.query(q)
		if err != nil {
			return nil, &SQLTransactionError{Class: "busyOrLocked", Err: err}
		}
		results = append(results, r)
	}
	return results, nil
}

func TestSessionFSGolden(t *testing.T) {
	leakCheck(t)
	dir := t.TempDir()
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state"}})
	s := createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: DirFS(dir)})
	when := time.Date(2026, 1, 2, 3, 4, 5, 678e6, time.UTC)
	for _, tt := range []struct{ method, params, want string }{
		{"readFile", `{"path":"/state/none"}`, `{"content":"","error":{"code":"ENOENT","message":"read /state/none"}}`},
		{"mkdir", `{"path":"/a/b","mode":448}`, `{"code":"ENOENT","message":"mkdir /a/b"}`},
		{"mkdir", `{"path":"/a/b/c","recursive":true,"mode":448}`, `null`},
		{"mkdir", `{"path":"/a/b/c","recursive":true}`, `null`},
		{"mkdir", `{"path":"/a/b/c"}`, `{"code":"UNKNOWN","message":"mkdir /a/b/c"}`},
		{"writeFile", `{"path":"/a/f","content":"one\u00e9\n","mode":384}`, `null`},
		{"appendFile", `{"path":"/a/f","content":"two"}`, `null`},
		{"appendFile", `{"path":"/new/deep/f","content":"x"}`, `null`},
		{"readFile", `{"path":"/a/f"}`, `{"content":"oneé\ntwo"}`},
		{"readFile", `{"path":"/a"}`, `{"content":"","error":{"code":"UNKNOWN","message":"read /a"}}`},
		{"exists", `{"path":"/a/f"}`, `{"exists":true}`},
		{"exists", `{"path":"/a/g"}`, `{"exists":false}`},
		{"exists", `{"path":"/../x"}`, `{"exists":false}`},
		{"stat", `{"path":"/a/f"}`, `{"isFile":true,"isDirectory":false,"size":9,"mtime":"2026-01-02T03:04:05.678Z","birthtime":"2026-01-02T03:04:05.678Z"}`},
		{"stat", `{"path":"/a/g"}`, `{"isFile":false,"isDirectory":false,"size":0,"mtime":"1970-01-01T00:00:00Z","birthtime":"1970-01-01T00:00:00Z","error":{"code":"ENOENT","message":"stat /a/g"}}`},
		{"readdir", `{"path":"/a"}`, `{"entries":["b","f"]}`},
		{"readdirWithTypes", `{"path":"/a"}`, `{"entries":[{"name":"b","type":"directory"},{"name":"f","type":"file"}]}`},
		{"readdir", `{"path":"/a/b/c"}`, `{"entries":[]}`},
		{"readdirWithTypes", `{"path":"/g"}`, `{"entries":[],"error":{"code":"ENOENT","message":"readdir /g"}}`},
		{"rename", `{"src":"/a/f","dest":"/a/h"}`, `null`},
		{"rename", `{"src":"/a/f","dest":"/a/h"}`, `{"code":"ENOENT","message":"rename /a/f to /a/h"}`},
		{"rm", `{"path":"/a/f"}`, `{"code":"ENOENT","message":"remove /a/f"}`},
		{"rm", `{"path":"/a/f","force":true}`, `null`},
		{"rm", `{"path":"/g","recursive":true}`, `{"code":"ENOENT","message":"stat /g"}`},
		{"rm", `{"path":"/g","recursive":true,"force":true}`, `null`},
		{"rm", `{"path":"/a/b","recursive":true}`, `null`},
		{"readdir", `{"path":"/a"}`, `{"entries":["h"]}`},

		{"readFile", `{}`, `-32602 params: path is missing`},
		{"rename", `{"src":"/a/h"}`, `-32602 params: src or dest is missing`},
		{"mkdir", `{"path":"/m","mode":-1}`, `-32602 params`},
		{"sqliteExists", `{}`, `-32603 this session has no SQLite`},
		{"watch", `{"path":"/a"}`, `-32601 method not found: sessionFs.watch`},
		{"readFile", `{"sessionId":"t","path":"/a/h"}`, `-32602 no such session here`},
	} {
		params := strings.Replace(tt.params, "{", `{"sessionId":"s",`, 1)
		if strings.Contains(tt.params, "sessionId") {
			params = tt.params
		}
		if got := hostShort(hostAnswer(p, "sessionFs."+tt.method, strings.Replace(params, ",}", "}", 1))); got != tt.want {
			t.Errorf("%s %s\ngot  %s\nwant %s", tt.method, tt.params, got, tt.want)
		}
		if tt.method == "appendFile" {
			if err := os.Chtimes(filepath.Join(dir, "a", "f"), when, when); err != nil {
				t.Fatal(err)
			}
		}
	}
	if runtime.GOOS != "windows" {
		if info, err := os.Stat(filepath.Join(dir, "a", "h")); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("the server's mode: %v %v", info.Mode(), err)
		}
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := hostAnswer(p, "sessionFs.readFile", `{"sessionId":"s","path":"/a/h"}`); !strings.HasPrefix(got, "-32602") {
		t.Errorf("after the end: %s", got)
	}
}

func TestSessionSQLiteGolden(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, &Options{SessionFS: &SessionFSConfig{InitialCWD: "/", StatePath: "/state", SQLite: true}})
	id := int64(7)
	db := sqlFS{newMapFS(), func(q SQLStatement) (SQLResult, error) {
		switch q.Query {
		case "bad":
			return SQLResult{}, errors.New("near bad")
		case "types":
			return SQLResult{Columns: []string{"go"}, Rows: []map[string]any{{"go": fmt.Sprintf("%T %T %T", q.Params["i"], q.Params["f"], q.Params["s"])}}}, nil
		case "panic":
			panic("no")
		}
		return SQLResult{RowsAffected: 1, LastInsertRowID: &id}, nil
	}}
	createSession(t, c, &SessionConfig{SessionID: "s", SessionFS: db})
	for _, tt := range []struct{ method, params, want string }{
		{"sqliteExists", `{"sessionId":"s"}`, `{"exists":true}`},
		{"sqliteQuery", `{"sessionId":"s","query":"insert","queryType":"run"}`, `{"rows":[],"columns":[],"rowsAffected":1,"lastInsertRowid":7}`},
		{"sqliteQuery", `{"sessionId":"s","query":"types","queryType":"query","params":{"i":3,"f":1.5,"s":"x"}}`, `{"rows":[{"go":"int64 float64 string"}],"columns":["go"],"rowsAffected":0}`},
		{"sqliteQuery", `{"sessionId":"s","query":"bad","queryType":"exec"}`, `{"rows":[],"columns":[],"rowsAffected":0,"error":{"code":"UNKNOWN","message":"near bad"}}`},
		{"sqliteQuery", `{"sessionId":"s","query":"panic","queryType":"exec"}`, `-32603 the host's handler panicked`},
		{"sqliteQuery", `{"sessionId":"s","query":1}`, `-32602 params`},
		{"sqliteTransaction", `{"sessionId":"s","statements":[{"query":"insert","queryType":"run"}]}`, `{"results":[{"rows":[],"columns":[],"rowsAffected":1,"lastInsertRowid":7}]}`},
		{"sqliteTransaction", `{"sessionId":"s","statements":[{"query":"bad","queryType":"run"}]}`, `{"results":[],"error":{"errorClass":"busyOrLocked","message":"near bad"}}`},
	} {
		if got := hostShort(hostAnswer(p, "sessionFs."+tt.method, tt.params)); got != tt.want {
			t.Errorf("%s %s\ngot  %s\nwant %s", tt.method, tt.params, got, tt.want)
		}
	}
}

func TestDirFSConfined(t *testing.T) {
	ctx := testContext(t)
	top := t.TempDir()
	dir, secret := filepath.Join(top, "dir"), filepath.Join(top, "secret")
	for _, d := range []string{filepath.Join(dir, "in"), filepath.Join(top, "out")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	names := []string{"/../secret", "../secret", "in/../../secret", "/in/../../secret", "a\x00b"}
	links := map[string]string{"file": secret, "dir": top, "back": filepath.Join("..", "secret"), "inside": filepath.Join(dir, "in"), "dangling": filepath.Join(top, "made")}
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(dir, "in", name)); err != nil {
			t.Skipf("no links here: %v", err)
		}
		names = append(names, "/in/"+name, "/in/"+name+"/secret")
	}
	files := DirFS(dir)
	for _, name := range names {
		if data, err := files.ReadFile(ctx, name); err == nil {
			t.Errorf("read %q: %q", name, data)
		} else if strings.Contains(err.Error(), top) {
			t.Errorf("read %q: shows our path: %v", name, err)
		}
		if err := files.WriteFile(ctx, name, []byte("x"), 0o600); err == nil {
			t.Errorf("wrote %q", name)
		}
		if err := files.AppendFile(ctx, name, []byte("x"), 0o600); err == nil {
			t.Errorf("appended to %q", name)
		}
		if _, err := files.Stat(ctx, name); err == nil {
			t.Errorf("stat %q", name)
		}
		if _, err := files.ReadDir(ctx, name); err == nil {
			t.Errorf("listed %q", name)
		}
		if err := files.MkdirAll(ctx, name+"/new", 0o700); err == nil {
			t.Errorf("made a directory below %q", name)
		}
		if err := files.Rename(ctx, "/in", name+"/moved"); err == nil {
			t.Fatalf("moved below %q", name)
		}
		if err := files.RemoveAll(ctx, name+"/secret"); err == nil && !strings.HasPrefix(name, "/in/") {
			t.Errorf("removed below %q", name)
		}
	}
	if _, err := files.Stat(ctx, ""); !errors.Is(err, fs.ErrInvalid) {
		t.Errorf("no name: %v", err)
	}
	for _, name := range []string{"/", ".", "/in/.."} {
		if files.RemoveAll(ctx, name) == nil || files.Remove(ctx, name) == nil || files.Rename(ctx, name, "/x") == nil {
			t.Errorf("the directory itself can be removed as %q", name)
		}
		if info, err := files.Stat(ctx, name); err != nil || !info.IsDir() {
			t.Errorf("stat %q: %v %v", name, info, err)
		}
	}
	for name := range links { // links themselves may go
		if err := files.Remove(ctx, "/in/"+name); err != nil {
			t.Error(err)
		}
	}
	if data, err := os.ReadFile(secret); err != nil || string(data) != "secret" {
		t.Errorf("outside: %q %v", data, err)
	}
	if entries, _ := os.ReadDir(top); len(entries) != 3 {
		t.Errorf("outside: %v", entries)
	}
	if err := files.WriteFile(ctx, `C:\state\f`, []byte("x"), 0o600); err != nil {
		t.Error(err)
	}
	if data, err := os.ReadFile(filepath.Join(dir, "C", "state", "f")); err != nil || string(data) != "x" {
		t.Errorf("a path with a drive: %q %v", data, err)
	}
	if _, err := files.ReadFile(ctx, `C:\..\..\secret`); !errors.Is(err, fs.ErrPermission) {
		t.Errorf("a path with a drive: %v", err)
	}
}

func TestDirFSBadFiles(t *testing.T) {
	ctx := testContext(t)
	dir := t.TempDir()
	big, err := os.Create(filepath.Join(dir, "big"))
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(big.Truncate(maxSessionFile+1), big.Close()); err != nil {
		t.Fatal(err)
	}
	if _, err := DirFS(dir).ReadFile(ctx, "/big"); err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("a huge file: %v", err)
	}
	if mkfifo, err := exec.LookPath("mkfifo"); err == nil {
		if err := exec.Command(mkfifo, filepath.Join(dir, "pipe")).Run(); err != nil {
			t.Fatal(err)
		}
		_, readErr := DirFS(dir).ReadFile(ctx, "/pipe") // would wait for a writer
		writeErr := DirFS(dir).WriteFile(ctx, "/pipe", nil, 0o600)
		if readErr == nil || writeErr == nil {
			t.Errorf("a named pipe: %v, %v", readErr, writeErr)
		}
	}
	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := DirFS(dir).ReadDir(cancelled, "/"); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestProviderToken(t *testing.T) {
	leakCheck(t)
	const token = "tok-3cr3t"
	logs := new(syncBuffer)
	c, p := newPeer(t, &Options{Logger: slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	provide := func(ctx context.Context, provider string) (string, error) {
		switch provider {
		case "fails":
			return token, fmt.Errorf("exchange of %s and static-key: denied", token)
		case "empty":
			return "", nil
		case "line":
			return token + "\n", nil
		case "panics":
			panic("at the bank")
		case "blocks":
			<-ctx.Done()
			return "", context.Cause(ctx)
		}
		return token + provider, nil
	}
	cfg := &SessionConfig{SessionID: "s"}
	for _, name := range []string{"acme", "fails", "empty", "line", "panics", "blocks"} {
		cfg.Providers = append(cfg.Providers, NamedProviderConfig{Name: name, BaseURL: "http://x", BearerTokenProvider: provide})
	}
	cfg.Providers = append(cfg.Providers, NamedProviderConfig{Name: "static", BaseURL: "http://x", APIKey: "static-key"})
	s := createSession(t, c, cfg)
	createSession(t, c, &SessionConfig{SessionID: "d", Provider: &ProviderConfig{BaseURL: "http://x", BearerTokenProvider: provide}})
	const bad = "-32603 token provider: it returned no token, or one with blanks or control characters"
	for _, tt := range []struct{ session, provider, want string }{
		{"s", "acme", `{"token":"tok-3cr3tacme"}`},
		{"d", "default", `{"token":"tok-3cr3tdefault"}`},
		{"s", "default", `-32603 no token provider for "default"`},
		{"s", "static", `-32603 no token provider for "static"`},
		{"s", "fails", `-32603 token provider: exchange of [redacted] and [redacted]: denied`},
		{"s", "empty", bad},
		{"s", "line", bad},
		{"s", "panics", `-32603 the host's handler panicked`},
		{"gone", "acme", `-32602 no such session here`},
	} {
		params := fmt.Sprintf(`{"sessionId":%q,"providerName":%q}`, tt.session, tt.provider)
		if got := hostAnswer(p, "providerToken.getToken", params); got != tt.want {
			t.Errorf("%s\ngot  %s\nwant %s", params, got, tt.want)
		}
	}
	if got := hostAnswer(p, "providerToken.getToken", `{"sessionId":"s","providerName":1}`); !strings.HasPrefix(got, "-32602 params") {
		t.Errorf("got %s", got)
	}
	blocked := p.ask("providerToken.getToken", json.RawMessage(`{"sessionId":"s","providerName":"blocks"}`))
	p.sync()
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := hostText(await(t, "answer", blocked)); !strings.HasPrefix(got, "-32603 token provider: ") {
		t.Errorf("got %s", got)
	}
	if strings.Contains(logs.String(), token) {
		t.Errorf("the log shows the token:\n%s", logs)
	}
}

// syncBuffer is a buffer for loggers.
type syncBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func TestGitHubToken(t *testing.T) {
	leakCheck(t)
	const token = "gho-3cr3t"
	c, p := newPeer(t, nil)
	var early string // the answer that came before the session's
	p.handle("session.create", func(p *peer, m peerMessage) any {
		id := m.get("gitHubTokenProviderRegistrationId")
		if id == nil {
			return map[string]any{"sessionId": m.get("sessionId")}
		}
		answer := p.ask("gitHubToken.getToken", map[string]any{"registrationId": id, "host": "github.com", "reason": "initial"})
		go func() { // ends with the client's answer; the peer has to read it
			early = hostText(<-answer)
			p.answer(m.ID, map[string]any{"sessionId": m.get("sessionId")})
		}()
		return noAnswer
	})
	var mu sync.Mutex
	var asked []GitHubTokenRequest
	result := &GitHubAccessToken{AccessToken: token, TokenType: "bearer", ExpiresIn: 8 * time.Hour}
	var fail error
	s := createSession(t, c, &SessionConfig{SessionID: "s", GitHubTokenProvider: func(ctx context.Context, r GitHubTokenRequest) (*GitHubAccessToken, error) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, r)
		return result, fail
	}})
	const good = `{"kind":"token","accessToken":"gho-3cr3t","tokenType":"bearer","expiresIn":28800}`
	if early != good {
		t.Errorf("during the start: %s", early)
	}
	registration, _ := p.wait("session.create", 1).get("gitHubTokenProviderRegistrationId").(string)
	if len(registration) != 36 {
		t.Errorf("registration %q", registration)
	}
	for _, tt := range []struct {
		name   string
		result *GitHubAccessToken
		err    error
		want   string
	}{
		{"again", result, nil, good},
		{"cancelled", nil, nil, `{"kind":"cancelled"}`},
		{"error", result, errors.New("no " + token), "-32603 GitHub token provider: no [redacted]"},
		{"no lifetime", &GitHubAccessToken{AccessToken: token}, nil, "-32603 GitHub token provider: ExpiresIn is less than a second"},
		{"no token", &GitHubAccessToken{ExpiresIn: time.Hour}, nil, "-32603 GitHub token provider: it returned no token, or one with blanks or control characters"},
	} {
		mu.Lock()
		result, fail = tt.result, tt.err
		mu.Unlock()
		params := fmt.Sprintf(`{"registrationId":%q,"host":"ghe.example","sessionId":"s","reason":"refresh"}`, registration)
		if got := hostAnswer(p, "gitHubToken.getToken", params); got != tt.want {
			t.Errorf("%s\ngot  %s\nwant %s", tt.name, got, tt.want)
		}
	}
	if want := []GitHubTokenRequest{{Host: "github.com", Reason: "initial"}, {"ghe.example", "s", "refresh"}}; !slices.Equal(asked[:2], want) {
		t.Errorf("asked %+v, want %+v", asked[:2], want)
	}
	const unknown = "-32601 no GitHub token provider has this registration"
	if got := hostAnswer(p, "gitHubToken.getToken", `{"registrationId":"other","host":"h","reason":"initial"}`); got != unknown {
		t.Errorf("got %s", got)
	}
	if err := s.Disconnect(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if got := hostAnswer(p, "gitHubToken.getToken", fmt.Sprintf(`{"registrationId":%q}`, registration)); got != unknown {
		t.Errorf("after the end: %s", got)
	}
	_, err := c.PrepareSession(&SessionConfig{GitHubToken: token, GitHubTokenProvider: func(context.Context, GitHubTokenRequest) (*GitHubAccessToken, error) { return nil, nil }})
	if !errors.Is(err, ErrInvalidConfig) {
		t.Errorf("both tokens: %v", err)
	}
	if text := fmt.Sprintf("%v %+v %#v %s", GitHubAccessToken{AccessToken: token}, &GitHubAccessToken{AccessToken: token}, GitHubAccessToken{AccessToken: token}, GitHubAccessToken{AccessToken: token}); strings.Contains(text, token) {
		t.Errorf("printing shows the token: %s", text)
	}
}

func TestCanvas(t *testing.T) {
	leakCheck(t)
	c, p := newPeer(t, nil)
	var got CanvasCall
	closed := false
	cfg := &SessionConfig{SessionID: "s", Canvases: []CanvasDeclaration{
		{ID: "board", DisplayName: "Board", Description: "d",
			Open: func(ctx context.Context, call CanvasCall) (CanvasView, error) {
				got = call
				if string(call.Input) == `"refuse"` {
					return CanvasView{}, fmt.Errorf("inner: %w", &CanvasError{"too_many", "three are open"})
				}
				return CanvasView{URL: "http://x/board", Title: "B"}, nil
			},
			Close: func(ctx context.Context, call CanvasCall) error { closed = true; return nil },
			Actions: []CanvasAction{
				{Name: "echo", Handler: func(ctx context.Context, call CanvasCall) (any, error) { return call.Input, nil }},
				{Name: "fail", Handler: func(ctx context.Context, call CanvasCall) (any, error) { return nil, errors.New("no ink") }},
				{Name: "panic", Handler: func(ctx context.Context, call CanvasCall) (any, error) { panic("ink") }},
				{Name: "declared"},
			}},
		{ID: "bare", DisplayName: "Bare", Description: "d"},
	}}
	createSession(t, c, cfg)
	if want := `[{"id":"board","displayName":"Board","description":"d","actions":[{"name":"echo"},{"name":"fail"},{"name":"panic"},{"name":"declared"}]},{"id":"bare","displayName":"Bare","description":"d"}]`; string(member(p.wait("session.create", 1).Params, "canvases")) != want {
		t.Errorf("declared %s", p.wait("session.create", 1).Params)
	}
	for _, tt := range []struct{ method, params, want string }{
		{"open", `"canvasId":"board","input":{"n":1},"host":{"capabilities":{"canvases":true}},"session":{"workingDirectory":"/w"}`, `{"url":"http://x/board","title":"B"}`},
		{"open", `"canvasId":"board","input":"refuse"`, `-32603 three are open {"code":"too_many","message":"three are open"}`},
		{"open", `"canvasId":"bare"`, `-32603 no handler for canvas "bare" {"code":"canvas_handler_unset","message":"no handler for canvas \"bare\""}`},
		{"close", `"canvasId":"board"`, `null`},
		{"close", `"canvasId":"other"`, `-32603 no handler for canvas "other" {"code":"canvas_handler_unset","message":"no handler for canvas \"other\""}`},
		{"action.invoke", `"canvasId":"board","actionName":"echo","input":[1.50]`, `[1.50]`},
		{"action.invoke", `"canvasId":"board","actionName":"fail"`, `-32603 no ink {"code":"canvas_handler_error","message":"no ink"}`},
		{"action.invoke", `"canvasId":"board","actionName":"panic"`, `-32603 the host's handler panicked {"code":"canvas_handler_error","message":"the host's handler panicked"}`},
		{"action.invoke", `"canvasId":"board","actionName":"declared"`, `-32603 no handler for action "declared" {"code":"canvas_action_no_handler","message":"no handler for action \"declared\""}`},
		{"action.invoke", `"canvasId":[]`, `-32602 params`},
		{"other", `"canvasId":"board"`, `-32601 method not found: canvas.other`},
	} {
		params := `{"sessionId":"s","extensionId":"e","instanceId":"i",` + tt.params + `}`
		if got := hostShort(hostAnswer(p, "canvas."+tt.method, params)); got != tt.want {
			t.Errorf("%s %s\ngot  %s\nwant %s", tt.method, tt.params, got, tt.want)
		}
		if tt.want == `{"url":"http://x/board","title":"B"}` {
			if got.SessionID != "s" || got.ExtensionID != "e" || got.CanvasID != "board" || got.InstanceID != "i" || string(got.Input) != `{"n":1}` ||
				got.WorkingDirectory != "/w" || got.CanvasesShown == nil || !*got.CanvasesShown {
				t.Errorf("opened with %+v", got)
			}
		}
	}
	if !closed {
		t.Error("not closed")
	}
}

// modelPeer plays the runtime's side of model requests.
type modelPeer struct {
	*peer
	frames chan string // the client's response, a line for each request
	accept func(peerMessage) bool
}

func newModelPeer(t *testing.T, transport http.RoundTripper) (*Client, *modelPeer) {
	logs := new(syncBuffer)
	t.Cleanup(func() {
		if strings.Contains(logs.String(), "3cr3t") {
			t.Errorf("the log shows a secret:\n%s", logs)
		}
	})
	c, p := newPeer(t, &Options{ModelTransport: transport, Logger: slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	m := &modelPeer{peer: p, frames: make(chan string, 1<<12), accept: func(peerMessage) bool { return true }}
	take := func(p *peer, msg peerMessage) any {
		var chunk struct {
			RequestID  string
			Status     int
			StatusText string
			Headers    json.RawMessage
			Data       *[]byte
			Binary     bool
			End        bool
			Error      json.RawMessage
		}
		if err := json.Unmarshal(msg.Params, &chunk); err != nil {
			t.Error(err)
		}
		line := chunk.RequestID + " "
		if chunk.Data == nil {
			line += fmt.Sprintf("%d %s %s", chunk.Status, chunk.StatusText, chunk.Headers)
		} else {
			line += fmt.Sprintf("%s binary=%v end=%v %s", *chunk.Data, chunk.Binary, chunk.End, chunk.Error)
		}
		accepted := m.accept(msg)
		m.frames <- strings.TrimSpace(line)
		return map[string]bool{"accepted": accepted}
	}
	p.handle("llmInference.httpResponseStart", take)
	p.handle("llmInference.httpResponseChunk", take)
	return c, m
}

func (m *modelPeer) begin(params string) {
	m.t.Helper()
	if got := hostAnswer(m.peer, "llmInference.httpRequestStart", params); got != "{}" {
		m.t.Errorf("start answered %s", got)
	}
}

func (m *modelPeer) chunk(params string) {
	m.t.Helper()
	if got := hostAnswer(m.peer, "llmInference.httpRequestChunk", params); got != "{}" {
		m.t.Errorf("chunk answered %s", got)
	}
}

func (m *modelPeer) expect(lines ...string) {
	m.t.Helper()
	for _, want := range lines {
		if got := await(m.t, want, m.frames); got != want {
			m.t.Errorf("got  %s\nwant %s", got, want)
		}
	}
}

const modelStart = `{"requestId":"r","method":"POST","url":"http://model.invalid/v1/x","headers":{}}`

func TestModelTransportRequest(t *testing.T) {
	leakCheck(t)
	type seen struct {
		method, url, header, body string
		length                    int64
		info                      ModelRequest
	}
	requests := make(chan seen, 1)
	_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		header, _ := json.Marshal(req.Header)
		info, _ := ModelRequestFrom(req.Context())
		requests <- seen{req.Method, req.URL.String(), string(header), string(body), req.ContentLength, info}
		return &http.Response{StatusCode: 201, Header: http.Header{"X-Id": {"1", "2"}, "Transfer-Encoding": {"chunked"}}, Body: io.NopCloser(strings.NewReader("ok"))}, nil
	}))
	for i, tt := range []struct {
		name, start string
		chunks      []string
		want        seen
	}{
		{"one piece",
			`{"requestId":"r","sessionId":"s","agentId":"a","parentAgentId":"p","agentInvocationId":"i","interactionType":"t","method":"POST","url":"http://m.invalid/x?q=1",
			"headers":{"authorization":["Bearer k"],"accept":["a","b"],"host":["h"],"content-length":["9"],"connection":["x-hop, close"],"x-hop":["1"],"te":["t"],"sec-websocket-key":["k"]}}`,
			[]string{`{"requestId":"r","data":"h\u00e9llo","binary":false,"end":true,"cancel":false}`},
			seen{"POST", "http://m.invalid/x?q=1", `{"Accept":["a","b"],"Authorization":["Bearer k"]}`, "héllo", 6, ModelRequest{"s", "a", "p", "i", "t"}}},
		{"no body", `{"requestId":"r","method":"GET","url":"http://m.invalid/models","headers":{}}`,
			[]string{`{"requestId":"r","data":"","end":true}`},
			seen{"GET", "http://m.invalid/models", `{}`, "", 0, ModelRequest{}}},
		{"pieces", modelStart,
			[]string{`{"requestId":"r","data":"aGVs","binary":true}`, `{"requestId":"r","data":"lo "}`, `{"requestId":"r","data":"AP8=","binary":true}`, `{"requestId":"r","data":"","end":true}`},
			seen{"POST", "http://model.invalid/v1/x", `{}`, "hello \x00\xff", -1, ModelRequest{}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			id := fmt.Sprint("r", i)
			own := func(params string) string { return strings.Replace(params, `"r"`, strconv.Quote(id), 1) }
			p.begin(own(tt.start))
			for _, c := range tt.chunks {
				p.chunk(own(c))
			}
			got := await(t, "request", requests)
			if tt.want.length < 0 {
				got.length = -1 // whether the first piece was alone depends on who was faster
			}
			if got != tt.want {
				t.Errorf("got  %+v\nwant %+v", got, tt.want)
			}
			p.expect(id+` 201 Created {"x-id":["1","2"]}`, id+` ok binary=true end=false`, id+`  binary=true end=true`)
			p.chunk(own(`{"requestId":"r","data":"late"}`)) // ignored
		})
	}
}

// streamBody is a response body that a test writes.
func streamBody(status int) (*io.PipeWriter, *http.Response) {
	r, w := io.Pipe()
	return w, &http.Response{StatusCode: status, Body: r}
}

func TestModelTransportStreamsBothWays(t *testing.T) {
	leakCheck(t)
	_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		w, resp := streamBody(200)
		go func() { // ends with the request's body
			_, err := io.Copy(w, req.Body)
			w.CloseWithError(err)
		}()
		return resp, nil
	}))
	p.begin(modelStart)
	p.chunk(`{"requestId":"r","data":"one"}`)
	p.expect(`r 200 OK {}`, `r one binary=true end=false`) // while the request goes on
	p.chunk(`{"requestId":"r","data":"two"}`)
	p.expect(`r two binary=true end=false`)
	p.chunk(`{"requestId":"r","data":"","end":true}`)
	p.expect(`r  binary=true end=true`)
}

func TestModelTransportPieces(t *testing.T) {
	leakCheck(t)
	body := strings.Repeat("0123456789abcdef", 5<<10) // 80 KiB
	_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(body))}, nil
	}))
	p.begin(modelStart)
	p.chunk(`{"requestId":"r","data":"","end":true}`)
	p.expect(`r 200 OK {}`)
	got := ""
	for {
		line := await(t, "piece", p.frames)
		data, _, _ := strings.Cut(strings.TrimPrefix(line, "r "), " binary")
		if len(data) > responsePiece {
			t.Errorf("a piece of %d bytes", len(data))
		}
		if got += data; strings.Contains(line, "end=true") {
			break
		}
	}
	if got != body {
		t.Errorf("got %d bytes, want %d", len(got), len(body))
	}
}

// brokenBody fails after its text.
type brokenBody struct {
	io.Reader
	closed chan struct{}
}

func (b brokenBody) Close() error { close(b.closed); return nil }

func TestModelTransportFailures(t *testing.T) {
	leakCheck(t)
	closed := make(chan struct{})
	respond := func(resp *http.Response, err error) roundTripper {
		return func(*http.Request) (*http.Response, error) { return resp, err }
	}
	ok := func(body io.Reader) *http.Response {
		return &http.Response{StatusCode: 200, Body: brokenBody{body, closed}}
	}
	before := func(message string) []string {
		return []string{`r 502 Bad Gateway {}`, `r  binary=true end=true {"message":"` + message + `"}`}
	}
	for _, tt := range []struct {
		name      string
		transport roundTripper
		start     string
		want      []string
	}{
		{name: "refused", transport: respond(nil, errors.New("dial: key-3cr3t refused")), want: before("dial: [redacted] refused")},
		{name: "nothing", transport: respond(nil, nil), want: before("Options.ModelTransport returned neither a response nor an error")},
		{name: "panic", transport: func(*http.Request) (*http.Response, error) { panic("no") }, want: before("the host's handler panicked")},
		{name: "goexit", transport: func(*http.Request) (*http.Response, error) { runtime.Goexit(); return nil, nil }, want: before("the host's handler panicked")},
		{name: "status", transport: respond(&http.Response{StatusCode: 101}, nil), want: before("the transport's response has the status 101")},
		{name: "header", transport: respond(&http.Response{StatusCode: 200, Header: http.Header{"X": {"a\r\nb"}}}, nil), want: before(`the transport's response has a header that is not valid: \"X\"`)},
		{name: "no body", transport: respond(&http.Response{StatusCode: 204}, nil), want: []string{`r 204 No Content {}`, `r  binary=true end=true`}},
		{name: "breaks", transport: respond(ok(io.MultiReader(strings.NewReader("half"), iotest.ErrReader(errors.New("reset")))), nil),
			want: []string{`r 200 OK {}`, `r half binary=true end=false`, `r  binary=true end=true {"message":"reset"}`}},
		{name: "no progress", transport: respond(&http.Response{StatusCode: 200, Body: io.NopCloser(iotest.ErrReader(nil))}, nil),
			want: []string{`r 200 OK {}`, `r  binary=true end=true {"message":"multiple Read calls return no data or error"}`}},
		{name: "URL", start: `{"requestId":"r","method":"POST","url":"http://a b","headers":{}}`, want: before(`not an HTTP request: \"POST\" \"http://a b\"`)},
		{name: "method", start: `{"requestId":"r","method":"P T","url":"http://a","headers":{}}`, want: before(`not an HTTP request: \"P T\" \"http://a\"`)},
		{name: "web socket", start: `{"requestId":"r","method":"GET","url":"ws://a","headers":{},"transport":"websocket"}`, want: before("Options.ModelTransport serves no web sockets")},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, p := newModelPeer(t, tt.transport)
			if tt.start == "" {
				tt.start = `{"requestId":"r","method":"POST","url":"http://a","headers":{"authorization":["Bearer key-3cr3t"]}}`
			}
			p.begin(tt.start)
			p.chunk(`{"requestId":"r","data":"","end":true}`)
			p.expect(tt.want...)
		})
	}
	await(t, "the body's close", closed)

	t.Run("base64", func(t *testing.T) {
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			_, err := io.ReadAll(req.Body)
			return nil, err
		}))
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"***","binary":true,"end":true}`)
		p.expect(before("a binary piece of the request body: illegal base64 data at input byte 0")...)
	})
	t.Run("params", func(t *testing.T) {
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done()
			return nil, req.Context().Err()
		}))
		p.begin(modelStart)
		for method, params := range map[string][]string{
			"httpRequestStart": {modelStart, `{"method":"GET","url":"http://a"}`, `{"requestId":"q","headers":{"a":"b"}}`, `[]`},
			"httpRequestChunk": {`{"requestId":3}`, `{"requestId":"r","data":7}`},
		} {
			for _, params := range params {
				if got := hostAnswer(p.peer, "llmInference."+method, params); !strings.HasPrefix(got, "-32602 params") {
					t.Errorf("%s %s: %s", method, params, got)
				}
			}
		}
		if line := await(t, "start", p.frames); line != "r 499  {}" {
			t.Errorf("got %s", line)
		}
	})
	t.Run("none", func(t *testing.T) {
		_, p := newPeer(t, nil)
		if got, want := hostAnswer(p, "llmInference.httpRequestStart", modelStart), "-32603 this client has no model transport"; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

func TestModelTransportCancel(t *testing.T) {
	leakCheck(t)
	const message = `{"message":"copilot: the request was resolved elsewhere: the runtime cancelled the model request","code":"cancelled"}`
	reading := make(chan error, 1)
	hang := roundTripper(func(req *http.Request) (*http.Response, error) {
		_, err := io.ReadAll(req.Body) // which knows nothing of contexts
		reading <- err
		return nil, err
	})
	t.Run("before the response", func(t *testing.T) {
		_, p := newModelPeer(t, hang)
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"part"}`)
		p.chunk(`{"requestId":"r","data":"","end":true,"cancel":true,"cancelReason":"runtime cancelled the request"}`)
		if err := await(t, "the body", reading); !errors.Is(err, errModelCancelled) {
			t.Error(err)
		}
		p.expect(`r 499  {}`, `r  binary=true end=true `+message)
	})
	t.Run("during the response", func(t *testing.T) {
		ended := make(chan error, 1)
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			w, resp := streamBody(200)
			context.AfterFunc(req.Context(), func() { w.CloseWithError(req.Context().Err()) })
			go func() { // streams for ever: ends with the exchange
				for {
					if _, err := w.Write([]byte("more")); err != nil {
						ended <- err
						return
					}
				}
			}()
			return resp, nil
		}))
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"","end":true}`)
		p.expect(`r 200 OK {}`)
		await(t, "a piece", p.frames)
		p.chunk(`{"requestId":"r","data":"","cancel":true}`)
		await(t, "the end of the stream", ended)
		for line := ""; !strings.Contains(line, "end=true"); {
			if line = await(t, "the last piece", p.frames); strings.Contains(line, "end=true") && line != `r  binary=true end=true `+message {
				t.Errorf("got %s", line)
			}
		}
	})
	t.Run("not accepted", func(t *testing.T) {
		closed := make(chan struct{})
		_, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 200, Body: brokenBody{io.MultiReader(strings.NewReader("a"), strings.NewReader("b")), closed}}, nil
		}))
		p.accept = func(m peerMessage) bool { return m.Method == "llmInference.httpResponseStart" }
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"","end":true}`)
		p.expect(`r 200 OK {}`, `r a binary=true end=false`)
		await(t, "the body's close", closed)
		p.begin(`{"requestId":"again","method":"GET","url":"http://a","headers":{}}`)
		p.chunk(`{"requestId":"again","data":"","cancel":true}`)
		for line := await(t, "the next exchange", p.frames); !strings.HasPrefix(line, "again "); line = await(t, "the next exchange", p.frames) {
			t.Errorf("after the refusal: %s", line)
		}
	})
	t.Run("session's end", func(t *testing.T) {
		c, p := newModelPeer(t, hang)
		s := createSession(t, c, &SessionConfig{SessionID: "s"})
		p.begin(`{"requestId":"r","sessionId":"s","method":"POST","url":"http://a","headers":{}}`)
		p.chunk(`{"requestId":"r","data":"part"}`)
		if err := s.Disconnect(testContext(t)); err != nil {
			t.Fatal(err)
		}
		if err := await(t, "the body", reading); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
		if line := await(t, "start", p.frames); line != `r 499  {}` {
			t.Errorf("got %s", line)
		}
	})
	t.Run("client's end", func(t *testing.T) {
		c, p := newModelPeer(t, hang)
		p.begin(modelStart)
		p.chunk(`{"requestId":"r","data":"part"}`)
		c.ForceStop()
		if err := await(t, "the body", reading); !errors.Is(err, ErrClosed) {
			t.Error(err)
		}
	})
}

func TestModelTransportOverflow(t *testing.T) {
	leakCheck(t)
	called, release, reading := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	c, p := newModelPeer(t, roundTripper(func(req *http.Request) (*http.Response, error) {
		if req.URL.Path == "/other" {
			return &http.Response{StatusCode: 200}, nil
		}
		close(called)
		<-release // reads nothing
		_, err := io.ReadAll(req.Body)
		reading <- err
		return nil, err
	}))
	p.begin(modelStart)
	p.chunk(`{"requestId":"r","data":"the first"}`)
	await(t, "transport", called)
	x := c.host.exchanges.find("r")
	x.body.mu.Lock()
	x.body.max = 1 << 10
	x.body.mu.Unlock()
	piece := `{"requestId":"r","data":"` + strings.Repeat("x", 1<<10) + `"}`
	p.chunk(piece) // one alone is taken, whatever its size
	if x.task.ctx.Err() != nil {
		t.Error("overflow by one piece")
	}
	p.chunk(piece)
	p.begin(`{"requestId":"o","method":"GET","url":"http://a/other","headers":{}}`)
	p.chunk(`{"requestId":"o","data":"","end":true}`)
	p.expect(`o 200 OK {}`, `o  binary=true end=true`) // nothing else is harmed
	close(release)
	if err := await(t, "the body", reading); !errors.Is(err, errBodyOverflow) {
		t.Error(err)
	}
	p.expect(`r 499  {}`, `r  binary=true end=true {"message":"too much of the request body waited to be read","code":"cancelled"}`)
}

func TestGitHubTelemetry(t *testing.T) {
	leakCheck(t)
	events := make(chan GitHubTelemetry, maxTelemetry+10)
	block, blocked := make(chan struct{}), make(chan struct{})
	c, p := newPeer(t, &Options{OnGitHubTelemetry: func(e GitHubTelemetry) {
		events <- e
		switch e.Event.Kind {
		case "panic":
			panic("no")
		case "goexit":
			runtime.Goexit()
		case "block":
			close(blocked)
			<-block
		}
	}})
	if got := p.wait("connect", 1).get("enableGitHubTelemetryForwarding"); got != true {
		t.Errorf("connect asks for telemetry: %v", got)
	}
	notify := func(params string) {
		p.send(notification("gitHubTelemetry.event", json.RawMessage(params)))
	}
	notify(`{"sessionId":"s","restricted":true,"event":{"kind":"k","created_at":"now","properties":{"a":"b"},"metrics":{"m":1.5},"features":{"f":"on"},"client":{"cli_version":"1","cpu_count":4,"is_staff":false}}}`)
	got := await(t, "event", events)
	if got.SessionID != "s" || !got.Restricted || got.Event.Kind != "k" || got.Event.Properties["a"] != "b" || got.Event.Metrics["m"] != 1.5 ||
		got.Event.Features["f"] != "on" || got.Event.Client.CLIVersion != "1" || got.Event.Client.CPUCount != 4 {
		t.Errorf("got %+v", got)
	}
	notify(`{"event":{"kind":null,"metrics":{"m":"odd"},"created_at":"kept"}}`)
	if got := await(t, "event", events); got.Event.CreatedAt != "kept" || got.Event.Kind != "" || len(got.Raw) == 0 {
		t.Errorf("odd event: %+v", got)
	}
	for _, kind := range []string{"panic", "goexit", "block"} {
		notify(`{"event":{"kind":"` + kind + `"}}`)
		if got := await(t, "event", events); got.Event.Kind != kind {
			t.Errorf("got %q, want %q", got.Event.Kind, kind)
		}
	}
	await(t, "the slow event", blocked)
	const dropped = 5
	for i := range maxTelemetry + dropped {
		notify(fmt.Sprintf(`{"event":{"kind":"%d"}}`, i))
	}
	p.sync() // the reader waits for nobody
	close(block)
	for i := dropped; i < maxTelemetry+dropped; i++ {
		if got := await(t, "event", events); got.Event.Kind != fmt.Sprint(i) {
			t.Fatalf("got %q, want %d", got.Event.Kind, i)
		}
	}
	if _, err := c.Ping(testContext(t), ""); err != nil {
		t.Error(err)
	}
}

func TestInstallCLI(t *testing.T) {
	leakCheck(t)
	ctx := testContext(t)
	dir := filepath.Join(t.TempDir(), "cache", "cli")
	program := []byte("#!/bin/sh\necho installed\n")
	install := func(r io.Reader) string {
		t.Helper()
		path, err := InstallCLI(ctx, dir, r)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, program) {
			t.Errorf("installed %q %v", got, err)
		}
		if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() || runtime.GOOS != "windows" && info.Mode().Perm() != 0o755 {
			t.Errorf("installed with mode %v %v", info.Mode(), err)
		}
		if entries, _ := os.ReadDir(dir); len(entries) != 1 {
			t.Errorf("left behind: %v", entries)
		}
		return path
	}
	path := install(bytes.NewReader(program))
	if want := fmt.Sprintf("copilot-%x", sha256.Sum256(program)); !strings.HasPrefix(filepath.Base(path), want) {
		t.Errorf("name %s, want %s", filepath.Base(path), want)
	}
	before, _ := os.Stat(path)
	if again := install(bytes.NewReader(program)); again != path {
		t.Errorf("again: %s", again)
	}
	if again := install(struct{ io.Reader }{bytes.NewReader(program)}); again != path { // cannot seek
		t.Errorf("again: %s", again)
	}
	if after, _ := os.Stat(path); !os.SameFile(before, after) {
		t.Error("a good file was replaced")
	}
	for _, corrupt := range []func() error{
		func() error { return os.WriteFile(path, program[:3], 0o755) },
		func() error { return os.WriteFile(path, bytes.ToUpper(program), 0o755) },
		func() error { return os.Chmod(path, 0o644) },
		func() error {
			return errors.Join(os.Remove(path), os.WriteFile(path+"x", program, 0o755), os.Symlink(path+"x", path), os.Rename(path+"x", filepath.Join(filepath.Dir(dir), "x")))
		},
	} {
		if err := corrupt(); err != nil {
			t.Log(err) // no links here
		}
		install(bytes.NewReader(program))
	}
	os.Remove(path)
	var all []<-chan error
	for range 8 {
		all = append(all, async(func() error {
			got, err := InstallCLI(ctx, dir, bytes.NewReader(program))
			if err == nil && got != path {
				err = errors.New("installed as " + got)
			}
			return err
		}))
	}
	for _, one := range all {
		if err := await(t, "install", one); err != nil {
			t.Error(err)
		}
	}
	install(bytes.NewReader(program))

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := InstallCLI(cancelled, dir, bytes.NewReader(program)); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	boom := errors.New("boom")
	for name, r := range map[string]io.Reader{"empty": strings.NewReader(""), "broken": iotest.ErrReader(boom), "broken later": io.MultiReader(strings.NewReader("x"), iotest.ErrReader(boom))} {
		if got, err := InstallCLI(ctx, dir, r); err == nil || got != "" || strings.HasPrefix(name, "broken") && !errors.Is(err, boom) {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
	if _, err := InstallCLI(ctx, path, bytes.NewReader(program)); err == nil { // the directory is a file
		t.Error("installed below a file")
	}
	install(bytes.NewReader(program)) // and nothing is left of the failures
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	if runtime.GOOS == "linux" {
		if got, err := InstallCLI(ctx, "", bytes.NewReader(program)); err != nil || !strings.HasPrefix(got, filepath.Join(os.Getenv("XDG_CACHE_HOME"), "copilot-go")) {
			t.Errorf("in the cache: %s %v", got, err)
		}
	}
}
