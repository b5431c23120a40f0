package copilot

// ======== route.go: what the runtime keeps at its host's ========
//
// The server asks for files, tokens, canvases and model traffic in the middle of its own work: each request is served in the class
// of Client.hostWork.

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

// hosted is what a session's host keeps for the server.
type hosted struct {
	files        SessionFS
	canvases     map[string]CanvasDeclaration
	tokens       map[string]func(ctx context.Context, provider string) (string, error) // by provider
	registration string                                                                // of gitHubToken
	gitHubToken  func(ctx context.Context, r GitHubTokenRequest) (*GitHubAccessToken, error)
}

// host is what a client keeps for the server besides its sessions' own.
type host struct {
	exchanges     exchanges
	telemetry     telemetry
	registrations map[string]*Session // GitHub token providers by the server's name; guarded by Client.mu
}

func newHost() *host {
	h := &host{registrations: make(map[string]*Session)}
	h.telemetry.work.max = 1
	return h
}

// registerLocked makes s known as a provider of GitHub tokens, which is asked before its start is answered. c.mu is held.
func (c *Client) registerLocked(s *Session) {
	if s.hosted.gitHubToken != nil {
		c.host.registrations[s.hosted.registration] = s
	}
}

// unregisterLocked undoes registerLocked.
func (c *Client) unregisterLocked(s *Session) {
	if id := s.hosted.registration; c.host.registrations[id] == s {
		delete(c.host.registrations, id)
	}
}

// hosting collects what cfg brings for the session with this id. Errors match ErrInvalidConfig.
func (c *Client) hosting(id string, cfg *SessionConfig) (*hosted, error) {
	h := &hosted{
		files:        cfg.SessionFS,
		canvases:     make(map[string]CanvasDeclaration),
		tokens:       make(map[string]func(context.Context, string) (string, error)),
		registration: cfg.GitHubTokenProviderRegistrationID,
		gitHubToken:  cfg.GitHubTokenProvider,
	}
	for _, canvas := range cfg.Canvases {
		canvas.Actions = slices.Clone(canvas.Actions)
		h.canvases[canvas.ID] = canvas
	}
	if cfg.Provider != nil && cfg.Provider.BearerTokenProvider != nil {
		h.tokens["default"] = cfg.Provider.BearerTokenProvider
	}
	for _, p := range cfg.Providers {
		if p.BearerTokenProvider != nil {
			h.tokens[p.Name] = p.BearerTokenProvider
		}
	}
	declared := c.opts.SessionFS
	if declared == nil {
		if h.files != nil {
			return nil, invalid("SessionFS", "the client's options declare none")
		}
		return h, nil
	}
	if h.files == nil && declared.New != nil {
		h.files = declared.New(id)
	}
	if h.files == nil {
		return nil, invalid("SessionFS", "missing: the client's options declare it")
	}
	if _, ok := h.files.(SessionSQLite); declared.SQLite && !ok {
		return nil, invalid("SessionFS", "is no SessionSQLite: the client's options declare SQLite")
	}
	return h, nil
}

// setUpHosting tells the server what this client keeps for it.
func (c *Client) setUpHosting(ctx context.Context) error {
	tell := func(method string, params any) error {
		raw, err := c.call(ctx, method, params, nil)
		if err == nil && string(member(raw, "success")) == "false" {
			err = errors.New(method + ": the server declined")
		}
		return err
	}
	if f := c.opts.SessionFS; f != nil {
		type capabilities struct {
			SQLite bool `json:"sqlite"`
		}
		params := struct {
			InitialCWD   string        `json:"initialCwd"`
			StatePath    string        `json:"sessionStatePath"`
			Conventions  string        `json:"conventions"`
			Capabilities *capabilities `json:"capabilities,omitempty"`
		}{f.InitialCWD, f.StatePath, f.Conventions, nil}
		if f.SQLite {
			params.Capabilities = &capabilities{true}
		}
		if err := tell("sessionFs.setProvider", params); err != nil {
			return err
		}
	}
	if c.opts.ModelTransport != nil {
		return tell("llmInference.setProvider", nil)
	}
	return nil
}

// hostRequest is directRequest for what the host keeps.
func (c *Client) hostRequest(method string) func(s *Session, params json.RawMessage) job {
	var serve func(ctx context.Context, s *Session, params json.RawMessage) (any, error)
	j := job{host: true}
	switch method {
	case "gitHubToken.getToken":
		serve = c.serveGitHubToken
	case "providerToken.getToken":
		serve = serveProviderToken
	case "canvas.open", "canvas.close", "canvas.action.invoke":
		j.reply = canvasReply
		serve = func(ctx context.Context, s *Session, params json.RawMessage) (any, error) {
			return serveCanvas(ctx, s, method, params)
		}
	case "sessionFs.readFile", "sessionFs.writeFile", "sessionFs.appendFile", "sessionFs.exists", "sessionFs.stat", "sessionFs.mkdir",
		"sessionFs.readdir", "sessionFs.readdirWithTypes", "sessionFs.rm", "sessionFs.rename",
		"sessionFs.sqliteQuery", "sessionFs.sqliteTransaction", "sessionFs.sqliteExists":
		j.scope = serviceScope // a release must not cancel the writes that it causes
		serve = func(ctx context.Context, s *Session, params json.RawMessage) (any, error) {
			return serveFile(ctx, s, method, params)
		}
	default:
		return nil
	}
	return func(s *Session, params json.RawMessage) job {
		j := j
		j.run = func(ctx context.Context) (any, error) { return serve(ctx, s, params) }
		return j
	}
}

// ---- session files ----

// SessionFSConfig declares, in [Options], that this client keeps the files of its sessions: the conversation, checkpoints, plans.
// Every session then needs a [SessionFS].
type SessionFSConfig struct {
	// InitialCWD is the sessions' working directory, as a path of the SessionFS; required.
	InitialCWD string
	// StatePath is where the server keeps a session's state; required. Paths elsewhere are used too.
	StatePath string
	// Conventions is "posix" or "windows": how the server writes paths. "" means this system's.
	Conventions string
	// SQLite declares that every SessionFS is a [SessionSQLite] as well.
	SQLite bool
	// New returns the files of a session whose [SessionConfig] has none. It is called while the session is being prepared; the id is "" where
	// the server will choose it. Nil from it is ErrInvalidConfig.
	New func(sessionID string) SessionFS
}

// checked fills in the defaults of f, which may be nil.
func (f *SessionFSConfig) checked() error {
	if f == nil {
		return nil
	}
	if f.Conventions == "" {
		f.Conventions = "posix"
		if runtime.GOOS == "windows" {
			f.Conventions = "windows"
		}
	}
	switch {
	case f.InitialCWD == "":
		return fmt.Errorf("%w: SessionFS.InitialCWD is missing", ErrInvalidConfig)
	case f.StatePath == "":
		return fmt.Errorf("%w: SessionFS.StatePath is missing", ErrInvalidConfig)
	case f.Conventions != "posix" && f.Conventions != "windows":
		return fmt.Errorf(`%w: SessionFS.Conventions %.64q is neither "posix" nor "windows"`, ErrInvalidConfig, f.Conventions)
	}
	return nil
}

// SessionFS holds the files of a session. Names are the server's paths, in the conventions that [SessionFSConfig] declares. Contents are text:
// bytes that are no UTF-8 reach the server as U+FFFD.
//
// Errors are results for the server, which tells only those that match [fs.ErrNotExist] from others, and reads their text. Methods are
// called from several goroutines at once, before the start of the session has returned already. ctx ends with the session.
//
// [DirFS] is one over a directory.
type SessionFS interface {
	ReadFile(ctx context.Context, name string) ([]byte, error)
	// WriteFile replaces the file or creates it; perm is what the server asks for, 0666 where it does not say.
	WriteFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error
	// AppendFile is WriteFile at the end of the file. It creates missing directories.
	AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error
	// Stat also answers whether a file exists.
	Stat(ctx context.Context, name string) (fs.FileInfo, error)
	ReadDir(ctx context.Context, name string) ([]fs.DirEntry, error)
	Mkdir(ctx context.Context, name string, perm fs.FileMode) error
	// MkdirAll also makes missing parents; a directory that exists is no error.
	MkdirAll(ctx context.Context, name string, perm fs.FileMode) error
	// Remove removes a file or an empty directory.
	Remove(ctx context.Context, name string) error
	// RemoveAll also removes what is below; nothing to remove is no error.
	RemoveAll(ctx context.Context, name string) error
	// Rename replaces a file of the new name, at best atomically: the server relies on it.
	Rename(ctx context.Context, oldName, newName string) error
}

// SessionSQLite is the part of a [SessionFS] that keeps a SQLite database for the session.
type SessionSQLite interface {
	Query(ctx context.Context, s SQLStatement) (SQLResult, error)
	// Transaction runs all statements or none, and returns a result for each. A [*SQLTransactionError] tells the server what it may do.
	Transaction(ctx context.Context, statements []SQLStatement) ([]SQLResult, error)
	// DatabaseExists reports whether there is a database yet; asking does not make one.
	DatabaseExists(ctx context.Context) (bool, error)
}

// SQLStatement is one statement of the server's.
type SQLStatement struct {
	Query string `json:"query"`
	// Type is "exec" for statements without a result, "query" for rows, "run" for a write that counts rows.
	Type string `json:"queryType"`
	// Params are the named parameters: string, bool, int64, float64, nil, or what else JSON has.
	Params map[string]any `json:"params"`
}

// SQLResult is the outcome of a statement. Values must encode as JSON.
type SQLResult struct {
	Rows            []map[string]any `json:"rows"`
	Columns         []string         `json:"columns"`
	RowsAffected    int64            `json:"rowsAffected"`
	LastInsertRowID *int64           `json:"lastInsertRowid,omitempty"`
}

// SQLTransactionError says how a transaction failed.
type SQLTransactionError struct {
	// Class is "busyOrLocked" (may be tried again), "fatal", or "postCommitAmbiguous" (nobody knows whether it took effect).
	Class string
	Err   error
}

func (e *SQLTransactionError) Error() string { return e.Err.Error() }
func (e *SQLTransactionError) Unwrap() error { return e.Err }

// fileError is a failure of the host's files on the wire.
type fileError struct {
	Code    string `json:"code"`
	Message string `json:"message,omitempty"`
}

func newFileError(err error) *fileError {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return &fileError{"ENOENT", err.Error()}
	}
	return &fileError{"UNKNOWN", err.Error()}
}

// maxSessionFile is the largest file that is read for the server, which takes it as one string.
const maxSessionFile = defaultMaxFrame

// serveFile answers sessionFs.*: what fails in the host's files is a result.
func serveFile(ctx context.Context, s *Session, method string, params json.RawMessage) (any, error) {
	var p struct {
		Path, Src, Dest  string
		Content          string
		Mode             *uint32
		Recursive, Force bool
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	files := s.hosted.files
	if files == nil {
		return nil, errors.New("this session has no SessionFS")
	}
	perm := func(unset fs.FileMode) fs.FileMode {
		if p.Mode == nil {
			return unset
		}
		return fs.FileMode(*p.Mode) & fs.ModePerm
	}
	name := strings.TrimPrefix(method, "sessionFs.")
	switch {
	case strings.HasPrefix(name, "sqlite"):
		return serveSQLite(ctx, files, name, params)
	case name == "rename" && (p.Src == "" || p.Dest == ""):
		return nil, &RPCError{Code: codeInvalidParams, Message: "params: src or dest is missing"}
	case name != "rename" && p.Path == "":
		return nil, &RPCError{Code: codeInvalidParams, Message: "params: path is missing"}
	}
	var err error
	switch name {
	case "readFile":
		data, err := files.ReadFile(ctx, p.Path)
		if err == nil && len(data) > maxSessionFile {
			err = &fs.PathError{Op: "read", Path: p.Path, Err: errTooLarge}
		}
		result := struct {
			Content string     `json:"content"`
			Error   *fileError `json:"error,omitempty"`
		}{Error: newFileError(err)}
		if err == nil {
			result.Content = string(data)
		}
		return result, nil
	case "exists":
		_, err := files.Stat(ctx, p.Path)
		return map[string]bool{"exists": err == nil}, nil
	case "stat":
		info, err := files.Stat(ctx, p.Path)
		result := struct {
			IsFile      bool       `json:"isFile"`
			IsDirectory bool       `json:"isDirectory"`
			Size        int64      `json:"size"`
			ModTime     time.Time  `json:"mtime"`
			BirthTime   time.Time  `json:"birthtime"`
			Error       *fileError `json:"error,omitempty"`
		}{Error: newFileError(err), ModTime: time.Unix(0, 0).UTC(), BirthTime: time.Unix(0, 0).UTC()}
		if err == nil {
			result.IsFile, result.IsDirectory, result.Size = info.Mode().IsRegular(), info.IsDir(), info.Size()
			result.ModTime, result.BirthTime = info.ModTime().UTC(), info.ModTime().UTC() // package fs knows no birth
		}
		return result, nil
	case "readdir", "readdirWithTypes":
		return serveReadDir(ctx, files, p.Path, name == "readdirWithTypes"), nil
	case "writeFile":
		err = files.WriteFile(ctx, p.Path, []byte(p.Content), perm(0o666))
	case "appendFile":
		err = files.AppendFile(ctx, p.Path, []byte(p.Content), perm(0o666))
	case "mkdir":
		mkdir := files.Mkdir
		if p.Recursive {
			mkdir = files.MkdirAll
		}
		err = mkdir(ctx, p.Path, perm(0o777))
	case "rm":
		remove := files.Remove
		if p.Recursive {
			if remove = files.RemoveAll; !p.Force {
				_, err = files.Stat(ctx, p.Path) // RemoveAll would not say
			}
		}
		if err == nil {
			err = remove(ctx, p.Path)
		}
		if p.Force && errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	case "rename":
		err = files.Rename(ctx, p.Src, p.Dest)
	}
	return newFileError(err), nil
}

func serveReadDir(ctx context.Context, files SessionFS, name string, types bool) any {
	type entry struct {
		Name string `json:"name"`
		Type string `json:"type"`
	}
	list, err := files.ReadDir(ctx, name)
	entries := []any{}
	for _, e := range list {
		switch {
		case err != nil:
		case !types:
			entries = append(entries, e.Name())
		case e.IsDir():
			entries = append(entries, entry{e.Name(), "directory"})
		default:
			entries = append(entries, entry{e.Name(), "file"})
		}
	}
	return struct {
		Entries []any      `json:"entries"`
		Error   *fileError `json:"error,omitempty"`
	}{entries, newFileError(err)}
}

func serveSQLite(ctx context.Context, files SessionFS, name string, params json.RawMessage) (any, error) {
	db, ok := files.(SessionSQLite)
	if !ok {
		return nil, errors.New("this session has no SQLite")
	}
	var p struct {
		SQLStatement
		Statements []SQLStatement
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	switch name {
	case "sqliteExists":
		exists, err := db.DatabaseExists(ctx)
		return map[string]bool{"exists": exists && err == nil}, nil
	case "sqliteQuery":
		p.wholeNumbers()
		r, err := db.Query(ctx, p.SQLStatement)
		if err != nil {
			r = SQLResult{}
		}
		r.notNil()
		return struct {
			SQLResult
			Error *fileError `json:"error,omitempty"`
		}{r, newFileError(err)}, nil
	}
	type transactionError struct {
		Class   string `json:"errorClass"`
		Message string `json:"message"`
	}
	var result struct {
		Results []SQLResult       `json:"results"`
		Error   *transactionError `json:"error,omitempty"`
	}
	for i := range p.Statements {
		p.Statements[i].wholeNumbers()
	}
	results, err := db.Transaction(ctx, p.Statements)
	if err != nil {
		result.Results, result.Error = []SQLResult{}, &transactionError{"fatal", err.Error()}
		if t := (*SQLTransactionError)(nil); errors.As(err, &t) {
			result.Error.Class = t.Class
		}
		return result, nil
	}
	result.Results = append([]SQLResult{}, results...)
	for i := range result.Results {
		result.Results[i].notNil()
	}
	return result, nil
}

// wholeNumbers makes int64 of the parameters that are whole numbers, which a database keeps apart from others.
func (s *SQLStatement) wholeNumbers() {
	for k, v := range s.Params {
		if f, ok := v.(float64); ok && f == float64(int64(f)) {
			s.Params[k] = int64(f)
		}
	}
}

// notNil makes empty lists of nil ones, which would be null on the wire.
func (r *SQLResult) notNil() {
	if r.Rows == nil {
		r.Rows = []map[string]any{}
	}
	if r.Columns == nil {
		r.Columns = []string{}
	}
}

var (
	errTooLarge = fmt.Errorf("larger than %d bytes", maxSessionFile)
	errOutside  = fmt.Errorf("leads out of the directory: %w", fs.ErrPermission)
	errLink     = fmt.Errorf("is a link: %w", fs.ErrPermission)
	errSpecial  = fmt.Errorf("is no regular file: %w", fs.ErrPermission)

	errNoDirectory = errors.New("is no directory")
)

// DirFS returns the files below a directory of this machine as a [SessionFS]: the path /a/b is dir/a/b, C:\a is dir/C/a. The directory is made when
// the first file is. Files may be 256 MiB large.
//
// No path leaves dir: ".." above it is refused, and so is every link below it, wherever it leads, except to remove or rename the link
// itself. One thing is not covered: somebody who may write below dir and puts a link in the place of a directory at the very
// moment of a call can win. Hard links are files like others.
func DirFS(dir string) SessionFS { return dirFS(filepath.Clean(dir)) }

type dirFS string

// locate returns the place of one of the server's paths, once no link stands on the way to it. make, when not zero, makes missing
// directories on that way.
func (d dirFS) locate(ctx context.Context, name string, make fs.FileMode) (path string, err error) {
	if ctx.Err() != nil {
		return "", contextError(ctx)
	}
	elements, err := splitPath(name)
	if err != nil {
		return "", err
	}
	path = string(d)
	if make != 0 {
		if err := os.MkdirAll(path, make); err != nil {
			return "", err
		}
	}
	for i, e := range elements {
		if path = filepath.Join(path, e); i == len(elements)-1 {
			break
		}
		if err := directory(path, make); err != nil {
			return "", err
		}
	}
	return path, nil
}

// locateEntry is locate for what may not be the directory itself.
func (d dirFS) locateEntry(ctx context.Context, name string) (string, error) {
	path, err := d.locate(ctx, name, 0)
	if err == nil && path == string(d) {
		err = fs.ErrPermission
	}
	return path, err
}

// splitPath takes a path of the server's apart. Links being refused, ".." can be taken literally.
func splitPath(name string) (elements []string, err error) {
	slashed := name
	drive := len(name) > 2 && name[1] == ':' && (name[2] == '\\' || name[2] == '/')
	if drive {
		slashed = name[:1] + name[2:]
	}
	if drive || runtime.GOOS == "windows" {
		slashed = strings.ReplaceAll(slashed, `\`, "/")
	}
	for _, e := range strings.Split(slashed, "/") {
		switch {
		case e == "" || e == ".":
		case e != "..":
			elements = append(elements, e)
		case len(elements) == 0:
			return nil, errOutside
		default:
			elements = elements[:len(elements)-1]
		}
	}
	local := filepath.Join(elements...)
	if name == "" || strings.Contains(name, "\x00") || local != "" && !filepath.IsLocal(local) { // names that the system reserves, too
		return nil, fs.ErrInvalid
	}
	return elements, nil
}

// directory returns nil if path is a directory and no link; it makes it when make is not zero.
func directory(path string, make fs.FileMode) error {
	info, err := os.Lstat(path)
	if make != 0 && errors.Is(err, fs.ErrNotExist) {
		if err := os.Mkdir(path, make); err != nil && !errors.Is(err, fs.ErrExist) { // another call may have been faster
			return err
		}
		info, err = os.Lstat(path)
	}
	switch {
	case err != nil:
		return err
	case info.Mode()&fs.ModeSymlink != 0:
		return errLink
	case !info.IsDir():
		return errNoDirectory
	}
	return nil
}

// openRegular opens a regular file and nothing else. What is there is looked at before, so that no device is touched, and after, so that
// what was opened is no other.
func openRegular(path string, flag int, perm fs.FileMode) (*os.File, error) {
	before, err := os.Lstat(path)
	switch {
	case err == nil && before.Mode()&fs.ModeSymlink != 0:
		return nil, errLink
	case err == nil && !before.Mode().IsRegular():
		return nil, errSpecial
	case err != nil && flag&os.O_CREATE == 0:
		return nil, err
	}
	f, err := os.OpenFile(path, flag|openNoFollow, perm)
	if err != nil {
		return nil, err
	}
	after, err := f.Stat()
	if err == nil && !after.Mode().IsRegular() {
		err = errSpecial
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// pathError says what was done to which of the server's paths. Our own path is no concern of the server's.
func pathError(op, name string, err error) error {
	if err == nil {
		return nil
	}
	var inner *fs.PathError
	var link *os.LinkError
	switch {
	case errors.As(err, &inner):
		err = inner.Err
	case errors.As(err, &link):
		err = link.Err
	}
	return &fs.PathError{Op: op, Path: name, Err: err}
}

func (d dirFS) ReadFile(ctx context.Context, name string) ([]byte, error) {
	path, err := d.locate(ctx, name, 0)
	if err != nil {
		return nil, pathError("read", name, err)
	}
	f, err := openRegular(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, pathError("read", name, err)
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > maxSessionFile {
		return nil, pathError("read", name, errTooLarge)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxSessionFile+1))
	return data, pathError("read", name, err)
}

func (d dirFS) WriteFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	return pathError("write", name, d.write(ctx, name, os.O_TRUNC, data, perm))
}

func (d dirFS) AppendFile(ctx context.Context, name string, data []byte, perm fs.FileMode) error {
	return pathError("append", name, d.write(ctx, name, os.O_APPEND, data, perm))
}

func (d dirFS) write(ctx context.Context, name string, flag int, data []byte, perm fs.FileMode) error {
	path, err := d.locate(ctx, name, 0o777)
	if err != nil {
		return err
	}
	f, err := openRegular(path, os.O_WRONLY|os.O_CREATE|flag, perm)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if closing := f.Close(); err == nil {
		err = closing
	}
	return err
}

func (d dirFS) Stat(ctx context.Context, name string) (info fs.FileInfo, err error) {
	path, err := d.locate(ctx, name, 0)
	if err == nil && path == string(d) {
		info, err = os.Stat(path)
	} else if err == nil {
		if info, err = os.Lstat(path); err == nil && info.Mode()&fs.ModeSymlink != 0 {
			err = errLink
		}
	}
	return info, pathError("stat", name, err)
}

func (d dirFS) ReadDir(ctx context.Context, name string) (entries []fs.DirEntry, err error) {
	path, err := d.locate(ctx, name, 0)
	if err == nil && path != string(d) {
		err = directory(path, 0)
	}
	if err == nil {
		entries, err = os.ReadDir(path)
	}
	return entries, pathError("readdir", name, err)
}

func (d dirFS) Mkdir(ctx context.Context, name string, perm fs.FileMode) error {
	path, err := d.locate(ctx, name, 0)
	if err == nil {
		err = os.Mkdir(path, perm)
	}
	return pathError("mkdir", name, err)
}

func (d dirFS) MkdirAll(ctx context.Context, name string, perm fs.FileMode) error {
	perm |= 0o700 // else what is below could not be made
	path, err := d.locate(ctx, name, perm)
	if err == nil && path != string(d) {
		err = directory(path, perm)
	}
	return pathError("mkdir", name, err)
}

func (d dirFS) Remove(ctx context.Context, name string) error {
	path, err := d.locateEntry(ctx, name)
	if err == nil {
		err = os.Remove(path)
	}
	return pathError("remove", name, err)
}

func (d dirFS) RemoveAll(ctx context.Context, name string) error {
	path, err := d.locateEntry(ctx, name)
	switch {
	case err == nil:
		err = os.RemoveAll(path)
	case errors.Is(err, fs.ErrNotExist):
		err = nil
	}
	return pathError("remove", name, err)
}

func (d dirFS) Rename(ctx context.Context, oldName, newName string) error {
	from, err := d.locateEntry(ctx, oldName)
	if err != nil {
		return pathError("rename", oldName, err)
	}
	to, err := d.locateEntry(ctx, newName)
	if err == nil {
		err = os.Rename(from, to)
	}
	return pathError("rename", oldName+" to "+newName, err)
}

// ---- tokens ----

// serveProviderToken answers providerToken.getToken. The function's own error goes to the server, without what is known to be secret.
func serveProviderToken(ctx context.Context, s *Session, params json.RawMessage) (any, error) {
	var p struct{ ProviderName string }
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	get := s.hosted.tokens[p.ProviderName]
	if get == nil {
		return nil, fmt.Errorf("no token provider for %s", quote(p.ProviderName))
	}
	token, err := get(ctx, p.ProviderName)
	if err == nil {
		err = checkToken(token)
	}
	if err != nil {
		return nil, errors.New("token provider: " + mask(err.Error(), append([]string{token}, *s.secrets...)))
	}
	return map[string]string{"token": token}, nil
}

// checkToken refuses what no header can carry. Its error does not show the token.
func checkToken(token string) error {
	if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return errors.New("it returned no token, or one with blanks or control characters")
	}
	return nil
}

// GitHubTokenRequest asks for a GitHub token, see [SessionConfig.GitHubTokenProvider].
type GitHubTokenRequest struct {
	Host      string // such as "github.com"
	SessionID string
	Reason    string // "initial", or "refresh" when the earlier token lasts an hour or less
}

// GitHubAccessToken is what a [SessionConfig.GitHubTokenProvider] returns. Printing it shows no token.
type GitHubAccessToken struct {
	AccessToken string `json:"accessToken,required,secret"`
	TokenType   string `json:"tokenType,omitempty"` // "" means bearer
	// ExpiresIn is how long the token lasts, in whole seconds; it must be positive. The server asks again in the last hour.
	ExpiresIn time.Duration `json:"expiresIn,required"`
}

// Format prints t without its secrets, for every verb.
func (t GitHubAccessToken) Format(f fmt.State, verb rune) { formatMasked(f, t) }

// MarshalJSON returns t without its secrets.
func (t GitHubAccessToken) MarshalJSON() ([]byte, error) { return maskedJSON(t) }

// serveGitHubToken answers gitHubToken.getToken, which names a registration, and a session at best.
func (c *Client) serveGitHubToken(ctx context.Context, _ *Session, params json.RawMessage) (any, error) {
	var p struct {
		GitHubTokenRequest
		RegistrationID string
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	c.mu.Lock()
	s := c.host.registrations[p.RegistrationID]
	c.mu.Unlock()
	if s == nil {
		return nil, &RPCError{Code: codeMethodNotFound, Message: "no GitHub token provider has this registration"}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(s.failure()) })()
	token, err := s.hosted.gitHubToken(ctx, p.GitHubTokenRequest)
	switch {
	case err != nil:
		if token == nil {
			token = &GitHubAccessToken{}
		}
		return nil, errors.New("GitHub token provider: " + mask(err.Error(), []string{token.AccessToken}))
	case token == nil:
		return map[string]string{"kind": "cancelled"}, nil
	case token.ExpiresIn < time.Second:
		return nil, errors.New("GitHub token provider: ExpiresIn is less than a second")
	}
	if err := checkToken(token.AccessToken); err != nil {
		return nil, errors.New("GitHub token provider: " + err.Error())
	}
	return struct {
		Kind        string `json:"kind"`
		AccessToken string `json:"accessToken"`
		TokenType   string `json:"tokenType,omitempty"`
		ExpiresIn   int64  `json:"expiresIn"`
	}{"token", token.AccessToken, token.TokenType, int64(token.ExpiresIn / time.Second)}, nil
}

// ---- canvases ----

// CanvasCall is what the server wants of a canvas of the host's.
type CanvasCall struct {
	SessionID   string
	ExtensionID string
	CanvasID    string
	InstanceID  string
	ActionName  string          // of an action only
	Input       json.RawMessage // as received, nil when there is none
	// WorkingDirectory is the session's, "" when the server does not say.
	WorkingDirectory string
	// CanvasesShown tells whether the place that the call comes from can show canvases; nil when it does not say.
	CanvasesShown *bool
}

// CanvasView is how an opened canvas is shown.
type CanvasView struct {
	URL    string `json:"url,omitempty"`
	Title  string `json:"title,omitempty"`
	Status string `json:"status,omitempty"`
}

// CanvasError is an error of a canvas with a code for the server. Other errors have the code "canvas_handler_error".
type CanvasError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (e *CanvasError) Error() string { return "canvas: " + e.Message + " (" + e.Code + ")" }

// serveCanvas answers canvas.*.
func serveCanvas(ctx context.Context, s *Session, method string, params json.RawMessage) (any, error) {
	var p struct {
		CanvasCall
		Host    struct{ Capabilities struct{ Canvases *bool } }
		Session struct{ WorkingDirectory string }
	}
	if bad := decodeParams(params, &p); bad != nil {
		return nil, bad
	}
	call := p.CanvasCall
	call.WorkingDirectory, call.CanvasesShown = p.Session.WorkingDirectory, p.Host.Capabilities.Canvases
	canvas, declared := s.hosted.canvases[call.CanvasID]
	switch {
	case !declared || canvas.Open == nil:
		return nil, &CanvasError{"canvas_handler_unset", "no handler for canvas " + quote(call.CanvasID)}
	case method == "canvas.open":
		return canvas.Open(ctx, call)
	case method == "canvas.close" && canvas.Close == nil:
		return nil, nil
	case method == "canvas.close":
		return nil, canvas.Close(ctx, call)
	}
	for _, a := range canvas.Actions {
		if a.Name == call.ActionName && a.Handler != nil {
			return a.Handler(ctx, call)
		}
	}
	return nil, &CanvasError{"canvas_action_no_handler", "no handler for action " + quote(call.ActionName)}
}

// canvasReply puts an error into the form that canvases have of their own.
func canvasReply(result any, err error) (any, error) {
	var rpc *RPCError
	var params *paramsError
	if err == nil || errors.As(err, &rpc) || errors.As(err, &params) {
		return result, err
	}
	told := &CanvasError{"canvas_handler_error", err.Error()}
	errors.As(err, &told)
	data, _ := marshal(told) // two strings
	return nil, &RPCError{Code: codeInternal, Message: told.Message, Data: data}
}

// ---- model traffic ----

const (
	maxRequestBody = 64 << 20 // of a model request, waiting to be read: room for every request that models take
	responsePiece  = 32 << 10 // of a model's response, sent at once
)

var (
	errBodyOverflow     = errors.New("too much of the request body waited to be read")
	errModelCancelled   = fmt.Errorf("%w: the runtime cancelled the model request", errResolved)
	errModelUnwanted    = errors.New("the runtime wants no more of the response")
	errModelWebSockets  = errors.New("Options.ModelTransport serves no web sockets")
	errModelNotResponse = errors.New("Options.ModelTransport returned neither a response nor an error")
	errExchangeOver     = errors.New("the exchange is over")
)

// ModelRequest says on whose behalf the runtime asks its model. Fields are "" where it does not say.
type ModelRequest struct {
	SessionID         string
	AgentID           string
	ParentAgentID     string
	AgentInvocationID string
	InteractionType   string
}

type modelRequestKey struct{}

// ModelRequestFrom returns what the context of an [http.Request] that was given to [Options.ModelTransport] knows of it.
func ModelRequestFrom(ctx context.Context) (ModelRequest, bool) {
	r, ok := ctx.Value(modelRequestKey{}).(ModelRequest)
	return r, ok
}

// exchanges are the model requests in progress, by the runtime's id.
type exchanges struct {
	mu   sync.Mutex
	byID map[string]*exchange
}

func (e *exchanges) find(id string) *exchange {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.byID[id]
}

// add reports false when the id is in use.
func (e *exchanges) add(x *exchange) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.byID[x.id] != nil {
		return false
	}
	if e.byID == nil {
		e.byID = make(map[string]*exchange)
	}
	e.byID[x.id] = x
	return true
}

func (e *exchanges) remove(x *exchange) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.byID, x.id)
}

// exchange is one model request and its response. The reader feeds the body; everything else happens on the exchange's own goroutine.
type exchange struct {
	client  *Client
	task    *task
	id      string
	method  string
	url     string
	header  http.Header
	socket  bool
	body    requestBody
	started bool // the response has begun
}

// serveModel takes a part of a model request, on the reader, and acknowledges it: the work is done elsewhere.
func (c *Client) serveModel(s *Session, method string, m *message) {
	refuse := func(bad error) { c.conn.replyNow(m.id, nil, refusal(bad)) }
	if c.opts.ModelTransport == nil {
		refuse(&RPCError{Code: codeInternal, Message: "this client has no model transport"})
		return
	}
	if method == "llmInference.httpRequestChunk" {
		if bad := c.modelChunk(m.params); bad != nil {
			refuse(bad)
			return
		}
		c.conn.replyNow(m.id, struct{}{}, nil)
		return
	}
	var p struct {
		ModelRequest
		RequestID, Method, URL, Transport string
		Headers                           http.Header
	}
	if bad := decodeParams(m.params, &p); bad != nil {
		refuse(bad)
		return
	}
	x := &exchange{client: c, id: p.RequestID, method: p.Method, url: p.URL, header: endToEnd(p.Headers), socket: p.Transport == "websocket"}
	x.body.max, x.body.wake = maxRequestBody, make(chan struct{}, 1)
	var sets []*tasks
	if s != nil {
		sets = append(sets, &s.tasks)
	}
	run := func(ctx context.Context) (any, error) {
		defer context.AfterFunc(ctx, func() { x.body.fail(context.Cause(ctx)) })() // wakes a transport that reads the body
		switch err := x.roundTrip(context.WithValue(ctx, modelRequestKey{}, p.ModelRequest)); err {
		case nil, errModelUnwanted:
			return nil, nil
		default:
			return nil, errors.New(x.mask(err.Error()))
		}
	}
	x.task = c.newTask(s, job{host: true, run: run}, "model "+p.RequestID, sets...)
	if p.RequestID == "" || !c.host.exchanges.add(x) {
		x.task.cancel(nil)
		refuse(&paramsError{errors.New("requestId is missing or in use")})
		return
	}
	c.conn.replyNow(m.id, struct{}{}, nil)
	x.task.start(func(_ any, err error) {
		x.finish(x.task.ctx, err)
		x.body.Close()
		c.host.exchanges.remove(x)
	})
}

// modelChunk gives a piece of a request's body to its exchange. Pieces for exchanges that are over are ignored.
func (c *Client) modelChunk(params json.RawMessage) error {
	id, data := unquote(member(params, "requestId")), member(params, "data") // which is decoded by whoever reads the body
	is := func(name string) bool { return string(member(params, name)) == "true" }
	if id == "" {
		return &paramsError{errors.New("requestId is missing")}
	}
	switch x := c.host.exchanges.find(id); {
	case x == nil:
		c.conn.log.Debug("copilot: ignored a piece of a model request that is over")
	case is("cancel"):
		x.task.cancel(errModelCancelled)
	case len(data) > 0 && data[0] != '"':
		bad := &paramsError{errors.New("data is no string")}
		x.task.cancel(bad)
		return bad
	case !x.body.push(data, is("binary"), is("end")):
		x.task.cancel(errBodyOverflow)
	}
	return nil
}

func (x *exchange) roundTrip(ctx context.Context) error {
	if x.socket {
		return errModelWebSockets
	}
	req, err := http.NewRequestWithContext(ctx, x.method, x.url, &x.body)
	if err != nil {
		return fmt.Errorf("not an HTTP request: %.64q %s", x.method, quote(x.url))
	}
	req.Header = x.header
	if req.ContentLength = x.body.length(); req.ContentLength == 0 {
		req.Body = http.NoBody
	}
	resp, err := x.client.opts.ModelTransport.RoundTrip(req)
	if err != nil {
		return err
	}
	if resp == nil {
		return errModelNotResponse
	}
	if resp.Body == nil {
		resp.Body = http.NoBody
	}
	defer resp.Body.Close()
	if err := checkResponse(resp); err != nil {
		return err
	}
	if err := x.respond(ctx, resp.StatusCode, endToEnd(resp.Header)); err != nil {
		return err
	}
	for r := bufio.NewReaderSize(resp.Body, responsePiece); ; {
		_, err := r.Peek(1) // waits for what comes first, and only for that
		piece, _ := r.Peek(r.Buffered())
		if len(piece) > 0 {
			err = x.send(ctx, responseChunk{Data: piece})
			r.Discard(len(piece))
		}
		switch {
		case err == io.EOF:
			return x.send(ctx, responseChunk{Data: []byte{}, End: true})
		case err != nil:
			return err
		}
	}
}

// finish tells the runtime of an exchange that did not end well. It has a second for that, since ctx may have ended.
func (x *exchange) finish(ctx context.Context, err error) {
	if err == nil {
		return
	}
	status, failure := http.StatusBadGateway, &exchangeError{}
	if ctx.Err() != nil {
		const clientClosedRequest = 499
		status, failure.Code, err = clientClosedRequest, "cancelled", context.Cause(ctx)
	}
	failure.Message = err.Error()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settle)
	defer cancel()
	err = nil
	if !x.started {
		err = x.respond(ctx, status, nil)
	}
	if err == nil {
		err = x.send(ctx, responseChunk{Data: []byte{}, End: true, Error: failure})
	}
	if err != nil {
		x.client.log.Debug("copilot: the failure of a model request was not told", "error", err)
	}
}

// mask hides what the request's headers are likely to keep secret, and the client's own secrets.
func (x *exchange) mask(text string) string {
	var hide []string
	for name, values := range x.header {
		name = strings.ToLower(name)
		if strings.Contains(name, "auth") || strings.Contains(name, "key") || strings.Contains(name, "token") {
			for _, v := range values {
				hide = append(hide, v, v[strings.LastIndexByte(v, ' ')+1:]) // also without its scheme
			}
		}
	}
	return x.client.mask(mask(text, hide), nil)
}

// responseChunk is a piece of a response on the wire.
type responseChunk struct {
	RequestID string         `json:"requestId"`
	Data      []byte         `json:"data"` // base64
	Binary    bool           `json:"binary"`
	End       bool           `json:"end,omitempty"`
	Error     *exchangeError `json:"error,omitempty"`
}

type exchangeError struct {
	Message string `json:"message"`
	Code    string `json:"code,omitempty"`
}

// respond begins the response.
func (x *exchange) respond(ctx context.Context, status int, header http.Header) error {
	x.started = true
	params := struct {
		RequestID  string              `json:"requestId"`
		Status     int                 `json:"status"`
		StatusText string              `json:"statusText,omitempty"`
		Headers    map[string][]string `json:"headers"`
	}{x.id, status, http.StatusText(status), make(map[string][]string)}
	for name, values := range header {
		params.Headers[strings.ToLower(name)] = values
	}
	return x.post(ctx, "llmInference.httpResponseStart", params)
}

func (x *exchange) send(ctx context.Context, chunk responseChunk) error {
	chunk.RequestID, chunk.Binary = x.id, true
	return x.post(ctx, "llmInference.httpResponseChunk", chunk)
}

// post sends a part of the response and waits until the runtime has taken it. That is a handler's answer, which goes out during a stop, too.
func (x *exchange) post(ctx context.Context, method string, params any) error {
	raw, err := x.client.callAlways(ctx, method, params, nil)
	if _, refused := err.(*RPCError); refused || err == nil && string(member(raw, "accepted")) == "false" {
		return errModelUnwanted
	}
	return err
}

// checkResponse refuses what the runtime could not make a response of.
func checkResponse(resp *http.Response) error {
	if resp.StatusCode < 200 || resp.StatusCode > 599 {
		return fmt.Errorf("the transport's response has the status %d", resp.StatusCode)
	}
	for name, values := range resp.Header {
		for _, v := range values {
			if name == "" || strings.ContainsFunc(name, func(r rune) bool { return r <= ' ' || r == ':' || r >= 0x7f }) ||
				strings.ContainsFunc(v, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
				return fmt.Errorf("the transport's response has a header that is not valid: %s", quote(name))
			}
		}
	}
	return nil
}

// endToEnd copies headers without those that belong to one connection (RFC 9110, section 7.6.1) or to the framing of a body.
func endToEnd(h http.Header) http.Header {
	kept := make(http.Header, len(h))
	drop := []string{"Host", "Content-Length", "Connection", "Keep-Alive", "Transfer-Encoding", "Upgrade", "Te", "Trailer", "Proxy-Connection"}
	for name, values := range h {
		if http.CanonicalHeaderKey(name) == "Connection" {
			for _, named := range strings.Split(strings.Join(values, ","), ",") {
				drop = append(drop, http.CanonicalHeaderKey(strings.TrimSpace(named)))
			}
		}
	}
	for name, values := range h {
		name = http.CanonicalHeaderKey(name)
		if !slices.Contains(drop, name) && !strings.HasPrefix(name, "Sec-Websocket-") {
			kept[name] = append(kept[name], values...)
		}
	}
	return kept
}

// requestBody is the body of a model request while it arrives: pieces that the reader has queued, for one goroutine to read.
type requestBody struct {
	rest []byte // decoded and not read yet; the reading goroutine's

	max   int           // bytes that may be queued
	wake  chan struct{} // capacity 1: there is news
	mu    sync.Mutex
	queue []bodyPiece
	size  int
	end   error // why nothing comes after the queue: io.EOF, or what went wrong
}

type bodyPiece struct {
	raw    json.RawMessage // a string
	binary bool
}

// push queues a piece without waiting. It reports false when too much is queued. One piece is taken whatever its size: it is here already.
func (b *requestBody) push(raw json.RawMessage, binary, last bool) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end != nil {
		return true
	}
	if len(b.queue) > 0 && b.size+len(raw) > b.max {
		return false
	}
	if len(raw) > len(`""`) {
		b.queue = append(b.queue, bodyPiece{raw, binary})
		b.size += len(raw)
	}
	if last {
		b.end = io.EOF
	}
	b.notify()
	return true
}

func (b *requestBody) notify() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// fail ends the body at once.
func (b *requestBody) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.end == nil || b.end == io.EOF {
		b.end = err
	}
	b.queue, b.size = nil, 0
	b.notify()
}

// pop waits for the next piece and returns it decoded.
func (b *requestBody) pop() ([]byte, error) {
	for {
		b.mu.Lock()
		if len(b.queue) > 0 {
			p := b.queue[0]
			b.queue[0] = bodyPiece{}
			b.queue, b.size = b.queue[1:], b.size-len(p.raw)
			b.mu.Unlock()
			data, err := p.decode()
			if err != nil {
				b.fail(err)
			}
			return data, err
		}
		err := b.end
		b.mu.Unlock()
		if err != nil {
			return nil, err
		}
		<-b.wake
	}
}

func (p bodyPiece) decode() ([]byte, error) {
	text := unquote(p.raw)
	if !p.binary {
		return []byte(text), nil
	}
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		err = fmt.Errorf("a binary piece of the request body: %w", err)
	}
	return data, err
}

// length waits for the first piece and returns the body's length if that was all, else -1. Errors come out of Read.
func (b *requestBody) length() int64 {
	rest, err := b.pop()
	if err != nil && err != io.EOF {
		return -1
	}
	b.rest = rest
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.queue) == 0 && b.end == io.EOF {
		return int64(len(rest))
	}
	return -1
}

func (b *requestBody) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		var err error
		if b.rest, err = b.pop(); err != nil {
			return 0, err
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

// Close makes a Read in progress and all later ones fail.
func (b *requestBody) Close() error {
	b.fail(errExchangeOver)
	return nil
}

// ---- telemetry ----

const (
	maxTelemetry      = 1024    // events waiting for Options.OnGitHubTelemetry
	maxTelemetryBytes = 8 << 20 // the same in bytes
)

// GitHubTelemetry is a telemetry event that the runtime forwards, see [Options.OnGitHubTelemetry].
type GitHubTelemetry struct {
	SessionID  string               `json:"sessionId"` // "" for events of no session
	Restricted bool                 `json:"restricted"`
	Event      GitHubTelemetryEvent `json:"event"`
	Raw        json.RawMessage      `json:"-"` // as received
}

// GitHubTelemetryEvent is the event proper.
type GitHubTelemetryEvent struct {
	Kind                 string                 `json:"kind"`
	CreatedAt            string                 `json:"created_at"`
	ModelCallID          string                 `json:"model_call_id"`
	Properties           map[string]string      `json:"properties"`
	Metrics              map[string]float64     `json:"metrics"`
	ExpAssignmentContext string                 `json:"exp_assignment_context"`
	Features             map[string]string      `json:"features"`
	SessionID            string                 `json:"session_id"`
	CopilotTrackingID    string                 `json:"copilot_tracking_id"`
	Client               *GitHubTelemetryClient `json:"client"`
}

// GitHubTelemetryClient describes the machine and program that an event comes from.
type GitHubTelemetryClient struct {
	CLIVersion  string `json:"cli_version"`
	OSPlatform  string `json:"os_platform"`
	OSVersion   string `json:"os_version"`
	OSArch      string `json:"os_arch"`
	NodeVersion string `json:"node_version"`
	CopilotPlan string `json:"copilot_plan"`
	ClientType  string `json:"client_type"`
	ClientName  string `json:"client_name"`
	IsStaff     bool   `json:"is_staff"`
	DevDeviceID string `json:"dev_device_id"`
	CPUModel    string `json:"cpu_model"`
	CPUCount    int    `json:"cpu_count"`
}

// telemetry hands events to the host one after the other. There is a goroutine only while there is one to hand over.
type telemetry struct {
	work limiter // of one at a time, which keeps their order

	mu      sync.Mutex
	queue   []json.RawMessage
	size    int
	dropped int // since the last one that was handed over
}

// push queues an event, on the reader. When too many wait, the oldest are dropped.
func (q *telemetry) push(c *Client, params json.RawMessage) {
	q.mu.Lock()
	before := len(q.queue)
	q.queue = append(q.queue, params)
	q.size += len(params)
	for len(q.queue) > maxTelemetry || len(q.queue) > 1 && q.size > maxTelemetryBytes {
		q.popLocked()
		q.dropped++
	}
	grown := len(q.queue) > before
	q.mu.Unlock()
	if grown { // else those that wait already will do
		q.work.run(func() { q.deliver(c) })
	}
}

func (q *telemetry) popLocked() (params json.RawMessage) {
	if len(q.queue) > 0 {
		params, q.queue[0] = q.queue[0], nil
		q.queue, q.size = q.queue[1:], q.size-len(params)
	}
	return params
}

// deliver hands over the oldest event.
func (q *telemetry) deliver(c *Client) {
	q.mu.Lock()
	params, dropped := q.popLocked(), q.dropped
	q.dropped = 0
	q.mu.Unlock()
	if dropped > 0 {
		c.log.Debug("copilot: dropped telemetry events that waited too long", "count", dropped)
	}
	if params == nil {
		return
	}
	event := GitHubTelemetry{Raw: params}
	if err := json.Unmarshal(params, &event); err != nil { // what has the expected type is there all the same
		c.log.Debug("copilot: a telemetry event of an unexpected shape", "error", err)
	}
	protect(c, func() (struct{}, error) { c.opts.OnGitHubTelemetry(event); return struct{}{}, nil }, func(struct{}, error) {})
}

// ======== process.go ========

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
