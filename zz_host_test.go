package copilot

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
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
	files := newMapFS()
	c := startReal(t, Options{SessionFS: &SessionFSConfig{InitialCWD: "/workspace", StatePath: "/state", Conventions: "posix"}})
	ctx := testContext(t)
	s := createSession(t, c, &SessionConfig{Model: "fake-model", Provider: hostProvider(model), SessionFS: files})
	for range 3 {
		if m, err := s.SendAndWait(ctx, Message{Prompt: "say: kept in a map"}); err != nil || m.Content != "kept in a map" {
			t.Fatalf("turn: %v %v", m, err)
		}
	}
	id := s.ID()
	if err := s.Disconnect(ctx); err != nil {
		t.Fatal(err)
	}
	log, err := files.ReadFile(ctx, "/state/events.jsonl")
	if err != nil || strings.Count(string(log), "kept in a map") < 6 {
		t.Errorf("the conversation is not in the map: %v\n%s", err, log)
	}
	s, err = c.ResumeSession(ctx, id, &SessionConfig{Model: "fake-model", Provider: hostProvider(model), SessionFS: files})
	if err != nil {
		t.Fatal(err)
	}
	m, err := s.SendAndWait(ctx, Message{Prompt: "history"})
	if err != nil || !strings.Contains(m.Content, "kept in a map") {
		t.Errorf("resumed from the map: %v %v", m, err)
	}
}

func TestRealModelTransport(t *testing.T) {
	model := newModel()
	model.URL = "http://nowhere.invalid"
	var mu sync.Mutex
	var infos []ModelRequest
	transport := roundTripper(func(req *http.Request) (*http.Response, error) {
		info, _ := ModelRequestFrom(req.Context())
		mu.Lock()
		infos = append(infos, info)
		mu.Unlock()
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
